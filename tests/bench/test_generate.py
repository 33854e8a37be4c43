"""Tests of the benchmark of text generation."""

import pytest

from bench import generate
from bench.generate import GenerateBench, main, measure
from fastgpt.errors import UserError


def test_every_contender_is_timed_in_every_case():
    pytest.importorskip("transformers")
    rows = measure(GenerateBench(recipe="shakespeare-cpu", prompt=8, tokens=3, rounds=2))
    cached = ["fastgpt", "fastgpt bf16", "transformers"]
    assert [row["implementation"] for row in rows] == 3 * cached
    assert [row["prompts"] for row in rows[::3]] == [[8], [8] * 4, [2, 4, 6, 8]]
    assert all(row["seconds"]["samples"] == 2 and row["seconds"]["p50"] > 0 for row in rows)


def test_ours_continues_prompts_of_unequal_lengths(monkeypatch):
    lengths = []

    def generated(model, tokens, **options):
        lengths.append((tuple(tokens.shape), options["lengths"].tolist()))

    monkeypatch.setattr(generate, "generate", generated)
    monkeypatch.setattr(generate, "transformers", lambda *_: list)
    measure(GenerateBench(recipe="shakespeare-cpu", prompt=8, tokens=3, rounds=2))
    assert ((4, 8), [2, 4, 6, 8]) in lengths


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--rounds 1", "--rounds is 1: expected 2 or more"),
        ("--prompt 3", "--prompt is 3: expected 4 or more"),
        ("shakespeare-cpu --tokens 1", "--prompt is 64, --tokens is 1: expected at most 64 in all"),
        ("gpt2-124m-modern", "the network differs from GPT-2's in"),
        ("gpt3", "gpt3"),
        ("shakespeare-cpu --prompt 8 --tokens 2 --nanogpt nowhere", "expected a checkout"),
    ],
)
def test_what_cannot_be_measured_is_an_error_in_one_line(arguments, message):
    with pytest.raises(UserError, match=message):
        main(arguments.split())
