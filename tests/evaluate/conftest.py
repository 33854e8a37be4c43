"""A tiny random model as a run and as an export, and a file of a task.

Fixtures import what they need: nothing may import triton before the tests are configured.
"""

import json
import random
from pathlib import Path

import pytest
import torch

LINES = 52


def write(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    """Run and export of one GPT-2 with a BPE tokenizer; its context is 40."""
    from tests.convert.models import converted, saved_run
    from tests.data.sets import tokenizer_of

    place, tokenizer = tmp_path_factory.mktemp("model"), tokenizer_of("bpe")
    torch.manual_seed(1)
    run = saved_run(place / "run", tokenizer, vocab_size=tokenizer.vocab_size)
    return run, converted(run, place / "hf", "hf")


@pytest.fixture
def scorer(folders):
    from fastgpt.convert.source import read
    from fastgpt.evaluate.__main__ import scorer_of

    return scorer_of(read(str(folders[0])), 7, "cpu", "fp32")


@pytest.fixture
def file(tmp_path) -> Path:
    """HellaSwag; some questions are longer than the context, some have marks of WikiHow."""
    from tests.data.sets import WORDS

    draw, words = random.Random(0), WORDS.split()

    def text(most: int) -> str:
        return " ".join(draw.choices(words, k=draw.randint(1, most)))

    def question() -> dict:
        endings = [f"{text(5)} [title]  {text(2)}." for _ in range(4)]
        context = {"activity_label": "Cats", "ctx_a": f"{text(30)}. [header]", "ctx_b": text(3)}
        return {**context, "ctx": "unused", "endings": endings, "label": draw.randrange(4)}

    return write(tmp_path / "hellaswag.jsonl", *(question() for _ in range(LINES)))
