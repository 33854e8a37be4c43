"""Times how long a checkpoint holds up training: `python -m bench.save [recipe]`.

A run of the recipe, with GPT-2's vocabulary, takes one step of a single sequence and then saves
several times. A save holds up training while weights are checked, and weights and optimizer state
are copied to host memory; a thread writes the copy afterwards. Nobody trains meanwhile.
"""

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro
from torch import Tensor
from torch.utils._pytree import tree_leaves

from bench import records
from fastgpt import flags
from fastgpt.cli import parse
from fastgpt.errors import UserError, run_command, unknown_name
from fastgpt.recipes import RECIPES
from fastgpt.trainer import Trainer

FLAGS = (
    "--steps 1 --data.source builtin --data.tokenizer bytes --model.vocab-size 50257"
    " --train.micro-batch 1 --train.compile off --train.keep-checkpoints 1 --force"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Save:
    """Times how long a checkpoint holds up training, and how long until it is on the disk."""

    recipe: Annotated[str, tyro.conf.Positional] = "gpt2-124m"
    """Recipe of the network and the optimizer."""
    rounds: int = 5
    """Number of checkpoints."""
    folder: Path = Path()
    """Folder on the disk to write to; nothing stays there."""

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise UserError(f"--rounds is {self.rounds}: expected 1 or more")


def measure(recipe: str, rounds: int, folder: Path) -> list[dict[str, Any]]:
    batch = f"--train.batch-tokens {RECIPES[recipe][1].model.context} --run-dir {folder / 'run'}"
    trainer = Trainer(parse([recipe, *FLAGS.split(), *batch.split()]))
    engine, saver, rows = trainer.engine, trainer.saver, []
    engine.train_step()
    saver.reserve(engine.model.state_dict(), engine.state())
    try:
        for step in range(1, rounds + 1):
            saver.wait()
            tree = (engine.model.state_dict(), engine.state())
            check = _seconds(engine.check_weights)
            copy = _seconds(partial(saver.save, step, *tree))
            rows.append({"check": check, "copy": copy, "write": _seconds(saver.wait)})
            rows[-1]["bytes"] = sum(x.nbytes for x in tree_leaves(tree) if isinstance(x, Tensor))
    finally:
        saver.close()
        engine.loader.close()
    return rows


def _seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main(argv: list[str]) -> None:
    asked = flags.parse(Save, argv, prog="python -m bench.save")
    if asked.recipe not in RECIPES:
        raise unknown_name("recipe", asked.recipe, RECIPES)
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        rows = measure(asked.recipe, asked.rounds, Path(folder).absolute())
    lines = []
    for row in rows:
        held = row["check"] + row["copy"]
        figures = (held, row["check"], row["copy"], row["write"])
        rate = f"{row['bytes'] / 1e9:.2f} GB at {row['bytes'] / row['copy'] / 1e9:.1f} GB/s"
        lines.append((*(f"{seconds:.3f}" for seconds in figures), rate))
    records.show("held up, s|check|copy|then written, s|copied", lines)
    print(records.Writer("cpu").write("save", *rows))


if __name__ == "__main__":
    run_command(main)
