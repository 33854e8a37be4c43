"""Tests of the benchmark of text generation."""

import pytest

from bench import generate
from bench.generate import GenerateBench, time_generation

SMALL = GenerateBench(recipe="shakespeare-cpu", prompt=8, tokens=3, rounds=2)


def test_every_implementation_is_timed_in_every_case():
    pytest.importorskip("transformers")
    rows = time_generation(SMALL)
    cached = ["fastgpt", "fastgpt exact", "fastgpt bf16", "transformers"]
    assert [row["implementation"] for row in rows] == 3 * cached
    assert [row["prompts"] for row in rows[::4]] == [[8], [8] * 4, [2, 4, 6, 8]]
    assert all(row["seconds"]["samples"] == 2 and row["seconds"]["p50"] > 0 for row in rows)


def test_ours_continues_prompts_of_unequal_lengths(monkeypatch):
    lengths = []

    def generated(model, tokens, **options):
        lengths.append((tuple(tokens.shape), options["lengths"].tolist()))

    monkeypatch.setattr(generate, "generate", generated)
    monkeypatch.setattr(generate, "transformers", lambda *_: list)
    time_generation(SMALL)
    assert ((4, 8), [2, 4, 6, 8]) in lengths
