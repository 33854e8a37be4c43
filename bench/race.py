"""Whole processes to a loss, beside nanoGPT's: `python -m bench.race --nanogpt PATH`.

Start, imports, data, training, evaluation and exit are all in the time. nanoGPT runs the command
that its README gives for small computers, on the same text, and keeps its last checkpoint; each
recipe runs as `python train.py`. Both losses are then over all windows of the held-out text.
"""

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

from bench import nanogpt, records
from fastgpt.data.corpus import Corpus
from fastgpt.data.prepare import open_corpus
from fastgpt.errors import UserError, shown_in_one_line
from fastgpt.metrics import read_records
from fastgpt.storage import data_dir

NANOGPT_FLAGS = (
    "--device=cpu", "--compile=False", "--eval_iters=20", "--log_interval=1", "--block_size=64",
    "--batch_size=12", "--n_layer=4", "--n_head=4", "--n_embd=128", "--max_iters=2000",
    "--lr_decay_iters=2000", "--dropout=0.0", "--always_save_checkpoint=True",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Race:
    """Runs recipes and nanoGPT's small-computer setting in turn, as whole processes."""

    nanogpt: Path
    """A checkout of nanoGPT; a copy of it is run."""
    recipes: tuple[str, ...] = ("shakespeare-cpu", "shakespeare-cpu-adamw")
    """Which recipes race."""
    rounds: int = 3
    """How often each one runs."""


def run_nanogpt(checkout: Path, corpus: Corpus) -> tuple[float, float]:
    """(seconds, validation loss over all windows of the held-out text)."""
    command = [sys.executable, "train.py", "config/train_shakespeare_char.py", *NANOGPT_FLAGS]
    seconds, _ = _timed(command, checkout)
    return seconds, nanogpt.validation_loss(checkout, corpus)


def run_recipe(recipe: str, folder: Path) -> tuple[float, float]:
    """(seconds, validation loss over all windows of the held-out text)."""
    run_dir = folder / f"{recipe}-{time.time_ns()}"
    root = Path(__file__).parent.parent
    command = [sys.executable, "train.py", recipe, "--run-dir", str(run_dir)]
    seconds, _ = _timed(command, root)
    losses = [r["val_loss"] for r in read_records(run_dir / "metrics.jsonl") if "val_loss" in r]
    return seconds, losses[-1]


def _timed(command: list[str], cwd: Path) -> tuple[float, str]:
    start = time.perf_counter()
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    if done.returncode:
        raise UserError(f"{' '.join(command)} failed: {done.stderr.strip().splitlines()[-1]}")
    return seconds, done.stdout


def main(argv: list[str]) -> None:
    race = tyro.cli(Race, prog="python -m bench.race", args=argv)
    os.environ["FASTGPT_DATA"] = str(data_dir().absolute())
    results: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = open_corpus("shakespeare", tokenizer="chars", val_fraction=0.1)
        checkout = nanogpt.copy_with_data(race.nanogpt.absolute(), folder, corpus)
        for _ in range(race.rounds):
            results.setdefault("nanogpt", []).append(run_nanogpt(checkout, corpus))
            for recipe in race.recipes:
                results.setdefault(recipe, []).append(run_recipe(recipe, folder))
    rows: list[dict[str, Any]] = []
    table = Table("run", "seconds", "val loss", "nanoGPT's time over it")
    for name, runs in results.items():
        ratios = [n / s for (n, _), (s, _) in zip(results["nanogpt"], runs, strict=True)]
        row = {
            "run_name": name,
            "seconds": [seconds for seconds, _ in runs],
            "val_loss": [loss for _, loss in runs],
            "nanogpt_over_it": ratios,
        }
        rows.append(row)
        spread = sorted(row["seconds"])
        losses = " ".join(f"{loss:.4f}" for loss in row["val_loss"])
        table.add_row(
            name,
            " ".join(f"{s:.1f}" for s in spread),
            losses,
            " ".join(f"{ratio:.2f}x" for ratio in ratios),
        )
    Console().print(table)
    print(records.write("race", "cpu", rows))


if __name__ == "__main__":
    with shown_in_one_line():
        main(sys.argv[1:])
