"""Small data sets of documents, prepared with a tokenizer that has an end-of-text token."""

import json
import random
from pathlib import Path

from fastgpt.data.prepare import prepare

WORDS = "the cat sat on a mat and that dog ran to its log while one old hen hid"


def texts(count: int, longest: int = 12, seed: int = 0) -> list[str]:
    """`count` texts of 1 to `longest` words, all different."""
    draw, words = random.Random(seed), WORDS.split()
    lengths = [draw.randint(1, longest) for _ in range(count)]
    return [f"{i} " + " ".join(draw.choices(words, k=n)) for i, n in enumerate(lengths)]


def write_json_lines(path: Path, documents: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


def prepared(out: Path, documents: list[str], tokenizer: str = "bpe", **options) -> Path:
    """A prepared directory `out` of `documents`, a fifth of them held out by their hash.

    257 tokens are the 256 bytes and the end of a text: sources of one alphabet share them.
    """
    source = write_json_lines(out.with_name(f"{out.name}.jsonl"), documents)
    if tokenizer == "bpe":
        options["vocab_size"] = 257
    return prepare(str(source), out, tokenizer=tokenizer, val_fraction=0.2, **options)
