"""Times whole training runs beside nanoGPT's: `python -m bench.race --nanogpt PATH`.

The time includes start, imports, data, training, evaluation and exit. nanoGPT runs the command that
its README gives for small computers, on the same text, and keeps its last checkpoint; each recipe
runs as `python train.py`. Both losses are then computed over all windows of the held-out text.
"""

import os
import pickle
import shutil
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch

from bench import records, tables
from bench.timing import time_process
from bench.trainers import nanogpt_module
from fastgpt import flags
from fastgpt.data.corpus import Corpus
from fastgpt.data.loader import IGNORED, eval_batches
from fastgpt.data.preparation import open_corpus
from fastgpt.errors import UserError, run_command
from fastgpt.files import data_dir
from fastgpt.logs.metrics import read_records

NANOGPT_FLAGS = (
    "--device=cpu", "--compile=False", "--eval_iters=20", "--log_interval=1", "--block_size=64",
    "--batch_size=12", "--n_layer=4", "--n_head=4", "--n_embd=128", "--max_iters=2000",
    "--lr_decay_iters=2000", "--dropout=0.0", "--always_save_checkpoint=True",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Race:
    """Runs recipes and nanoGPT's example for small computers in turn, as whole processes."""

    nanogpt: Path
    """Path of a nanoGPT checkout; a copy of it is run."""
    recipes: tuple[str, ...] = ("shakespeare-cpu", "shakespeare-cpu-adamw")
    """Recipes to run; flags may follow the name, as in "shakespeare-cpu --steps 200"."""
    rounds: int = 3
    """Number of runs of each."""


def copy_with_data(checkout: Path, folder: Path, corpus: Corpus) -> Path:
    """Copies the checkout and adds tiny shakespeare in the layout that its train.py reads."""
    if not (checkout / "train.py").exists():
        raise UserError(f"--nanogpt {checkout}: expected a checkout of nanoGPT, found no train.py")
    copy = folder / "nanogpt"
    shutil.copytree(checkout, copy, ignore=shutil.ignore_patterns(".git"))
    data = copy / "data" / "shakespeare_char"
    corpus.train[:].tofile(data / "train.bin")
    corpus.val[:].tofile(data / "val.bin")
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": corpus.tokenizer.vocab_size}))
    return copy


@torch.no_grad()
def nanogpt_loss(checkout: Path, corpus: Corpus) -> float:
    """Computes the mean loss in nats of the last checkpoint over all held-out windows."""
    module = nanogpt_module(checkout)
    saved = torch.load(checkout / "out-shakespeare-char" / "ckpt.pt", weights_only=True)
    model = module.GPT(module.GPTConfig(**saved["model_args"])).eval()
    model.load_state_dict(saved["model"])
    total = count = 0.0
    batches = eval_batches(
        corpus.val,
        context=model.config.block_size,
        micro_batch=64,
        rank=0,
        world_size=1,
        max_tokens=0,
    )
    for x, y in batches:
        scored = int((y != IGNORED).sum())
        _, loss = model(x, torch.where(y == IGNORED, -1, y))  # nanoGPT's ignore_index
        total, count = total + loss.item() * scored, count + scored
    return total / count


def run_nanogpt(checkout: Path, corpus: Corpus) -> tuple[float, float]:
    """Trains nanoGPT; returns seconds and the loss over all windows of the held-out text."""
    arguments = ("train.py", "config/train_shakespeare_char.py", *NANOGPT_FLAGS)
    seconds, _ = time_process("nanoGPT", *arguments, cwd=checkout)
    return seconds, nanogpt_loss(checkout, corpus)


def run_recipe(recipe: str, folder: Path) -> tuple[float, float]:
    """Trains a recipe; returns seconds and the loss over all windows of the held-out text."""
    run_dir = folder / f"run-{time.time_ns()}"
    seconds, _ = time_process(recipe, "train.py", *recipe.split(), "--run-dir", str(run_dir))
    losses = [r["val_loss"] for r in read_records(run_dir / "metrics.jsonl") if "val_loss" in r]
    return seconds, losses[-1]


def main(argv: list[str]) -> None:
    race = flags.command(Race, argv, prog="python -m bench.race")
    os.environ["FASTGPT_DATA"] = str(data_dir().absolute())
    results: dict[str, list[tuple[float, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = open_corpus("shakespeare", tokenizer="chars", val_fraction=0.1)
        checkout = copy_with_data(race.nanogpt.absolute(), folder, corpus)
        for _ in range(race.rounds):
            results["nanogpt"].append(run_nanogpt(checkout, corpus))
            for recipe in race.recipes:
                results[recipe].append(run_recipe(recipe, folder))
    rows = []
    for name, runs in results.items():
        seconds, losses = zip(*runs)
        ratios = [n / s for (n, _), s in zip(results["nanogpt"], seconds, strict=True)]
        rows.append(
            {"run_name": name, "seconds": seconds, "val_loss": losses, "nanogpt_over_it": ratios}
        )
    records.show(tables.RACE, map(tables.race_cells, rows))
    print(records.Writer("cpu").write("race", *rows))


if __name__ == "__main__":
    run_command(main)
