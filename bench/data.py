"""Benchmarks data preparation beside tiktoken, and the loader: `python -m bench.data`.

The text is cut into documents of 4,000 characters, as JSON lines, repeated up to the size asked
for. tiktoken gets them as a list in memory with its own threads, and only `encode_ordinary_batch`
is timed; `fastgpt.prepare` is timed as a whole process: start, reading, tokens, shards, checksums.
"""

import itertools
import json
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench import records
from bench.timing import quantiles, time_process
from fastgpt import flags
from fastgpt.data.loader import Loader
from fastgpt.data.order import Mixture, SampleOrder
from fastgpt.data.preparation import open_corpus
from fastgpt.data.reading import read_chunks
from fastgpt.data.sources import find_source
from fastgpt.errors import run_command
from fastgpt.files import data_dir

DOCUMENT = 4000
LOADER_SHAPES = ((64, 1024), (16, 1024), (64, 256))
TIKTOKEN_ALONE = """
import json, sys, time
from fastgpt.data.tokenizers import make_tokenizer
texts = [json.loads(line)["text"] for line in open(sys.argv[1], encoding="utf-8")]
encoding = make_tokenizer("gpt2", None)._encoding
began = time.perf_counter()
found = encoding.encode_ordinary_batch(texts, num_threads=int(sys.argv[2]))
print(time.perf_counter() - began, sum(map(len, found)))
"""
PREPARE = """
import resource, sys
from fastgpt.prepare import main
main(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataBench:
    """Times the preparation of text, beside tiktoken alone, and the loading of batches."""

    megabytes: int = 100
    """Size of the text in megabytes."""
    text: str = "builtin"
    """Source of the text: anything that fastgpt.prepare accepts."""
    rounds: int = 3
    """Number of runs of each program, in turn."""
    threads: int = os.cpu_count() or 1
    """Number of threads for each program."""


def write_documents(source: str, size: int, path: Path) -> None:
    """Writes JSON lines with `size` bytes of text."""
    text = "".join(str(chunk.text) for chunk in read_chunks(find_source(source)))
    written = 0
    with path.open("w", encoding="utf-8") as file:
        for start in itertools.cycle(range(0, len(text), DOCUMENT)):
            document = text[start : start + DOCUMENT]
            file.write(json.dumps({"text": document}) + "\n")
            written += len(document.encode())
            if written >= size:
                return


def loader_rows(prepared_dir: Path) -> list[dict[str, Any]]:
    """Measures the loader with a consumer that does nothing else: million tokens per second."""
    corpus = open_corpus(str(prepared_dir), tokenizer="auto", val_fraction=0.1)
    rows = []
    for batch, context in LOADER_SHAPES:
        order = SampleOrder(len(corpus.train), context=context, seed=0)
        with Loader(
            [corpus.train],
            Mixture([order], [1.0]),
            context=context,
            global_batch=batch,
            micro_batch=batch,
        ) as loader:
            rates = [_rate(loader, batch * context) for _ in range(20)]
        rows.append({"case": f"loader ({batch}, {context})", **quantiles(rates)})
    return rows


def _rate(loader: Loader, tokens: int, batches: int = 50) -> float:
    began = time.perf_counter()
    for _ in range(batches):
        loader.next()
    return tokens * batches / (time.perf_counter() - began) / 1e6


def main(argv: list[str]) -> None:
    bench = flags.command(DataBench, argv, prog="python -m bench.data")
    os.environ["FASTGPT_DATA"] = str(data_dir().absolute())
    alone, ours, memory, tokens = [], [], [], 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path, threads = folder / "documents.jsonl", str(bench.threads)
        write_documents(bench.text, bench.megabytes * 1_000_000, path)
        for number in range(bench.rounds):
            _, said = time_process("tiktoken", "-c", TIKTOKEN_ALONE, str(path), threads)
            alone.append(float(said.split()[0]))
            tokens = int(said.split()[1])
            options = ["--out", str(folder / f"out{number}"), "--tokenizer", "gpt2"]
            options += ["--workers", threads]
            seconds, said = time_process("fastgpt.prepare", "-c", PREPARE, str(path), *options)
            ours.append(seconds)
            memory.append(int(said.split()[-1]))
        rows = loader_rows(folder / "out0")
    ratios = [a / b for a, b in zip(alone, ours)]
    rows.insert(0, {
        "case": "prepare", "text": bench.text, "megabytes": bench.megabytes, "tokens": tokens,
        "threads": bench.threads, "tiktoken_alone_s": alone, "prepare_s": ours,
        "tiktoken_over_prepare": ratios, "max_resident_kib": memory,
    })  # fmt: skip
    lines = [
        ("tiktoken alone, s", " ".join(f"{s:.2f}" for s in alone)),
        ("prepare, whole process, s", " ".join(f"{s:.2f}" for s in ours)),
        ("tiktoken's time / prepare's", " ".join(f"{ratio:.2f}x" for ratio in ratios)),
        ("million tokens/s", f"{tokens / np.median(ours) / 1e6:.2f}"),
        ("largest resident set, MiB", " ".join(f"{kib / 1024:.0f}" for kib in memory)),
        *((f"{row['case']}, million tokens/s", f"{row['p50']:.0f}") for row in rows[1:]),
    ]
    records.show("measurement|result", lines)
    print(records.Writer("cpu").write("data", *rows))


if __name__ == "__main__":
    run_command(main)
