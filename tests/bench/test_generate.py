"""The benchmark of text generation."""

import pytest

from bench import generate


def test_every_implementation_continues_the_prompts_of_every_case(monkeypatch):
    pytest.importorskip("transformers")
    ours = []
    monkeypatch.setattr(generate, "generate", lambda *_, **options: ours.append(options))
    bench = generate.GenerateBench(recipe="shakespeare-cpu", prompt=8, tokens=3, rounds=2)
    rows = [(x["implementation"], x["prompts"]) for x in generate.run(bench)]
    names = ("fastgpt", "fastgpt exact", "fastgpt bf16", "transformers")
    prompts = ([8], [8, 8, 8, 8], [2, 4, 6, 8])
    assert rows == [(name, lengths) for lengths in prompts for name in names]
    assert {x["exact"] for x in ours if len(x["lengths"]) == 4} == {False, True}
