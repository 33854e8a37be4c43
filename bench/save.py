"""Times how long a checkpoint holds up training: `python -m bench.save [recipe]`.

A run of the recipe, with GPT-2's vocabulary, takes one step of a single sequence and then saves
several times. A save holds up training while weights are checked, and weights and optimizer state
are copied to host memory; a thread writes the copy afterwards. Nobody trains meanwhile.

Under torchrun with `--kind fsdp` the ranks' parts are gathered on rank 0; the slowest rank counts.
"""

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from torch import Tensor
from torch.utils._pytree import tree_leaves

from bench import records
from fastgpt import flags
from fastgpt.checkpoint import checkpoint
from fastgpt.cli import configure
from fastgpt.config.recipes import RECIPES
from fastgpt.errors import UserError, run_command, unknown_name
from fastgpt.guards.nonfinite import check_weights
from fastgpt.parallel import distributed
from fastgpt.parallel.distributed import World
from fastgpt.train.build import restore
from fastgpt.train.trainer import Trainer, train

FLAGS = (
    "--steps 1 --data.source builtin --data.tokenizer bytes --model.vocab-size 50257"
    " --train.micro-batch 1 --train.compile off --train.keep-checkpoints 1 --track none"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Save:
    """Times how long a checkpoint holds up training, and how long until it is on the disk."""

    recipe: Annotated[str, tyro.conf.Positional] = "gpt2-124m"
    """Recipe of the network and the optimizer."""
    rounds: int = 5
    """Number of checkpoints."""
    folder: Path = Path()
    """Folder on the disk to write to; nothing stays there, unless a run is named."""
    kind: Literal["ddp", "fsdp"] = "ddp"
    """Part of the model that each rank keeps: all of it (ddp) or a part (fsdp)."""
    keep: str | None = None
    """Name of a run in the folder, which stays there. If it exists, the time is also measured to
    verify and load its last checkpoint, which any number of ranks may have written."""

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise UserError(f"--rounds is {self.rounds}: expected 1 or more")


def time_saves(asked: Save, path: Path) -> tuple[World, list[dict[str, Any]]]:
    """Saves several times, and reads an earlier checkpoint in `path` before, if there is one."""
    exists, ranks = path.exists(), int(os.environ.get("WORLD_SIZE", 1))
    batch = RECIPES[asked.recipe][1].model.context * ranks
    more = f"--train.batch-tokens {batch} --run-dir {path} --resume auto --steps {1 + exists}"
    config = configure([asked.recipe, *FLAGS.split(), *more.split(), "--parallel.kind", asked.kind])
    trainer = Trainer(config)
    run, saver, world, rows = trainer.run, trainer.recorder.saver, trainer.world, []
    read = {}
    if exists:
        last = checkpoint.steps_on_disk(path / "checkpoints")[-1]
        load = partial(checkpoint.load, last, world=world)
        read["verify"] = _seconds(load, world)
        loaded = _seconds(lambda: restore(load(), run.model, run.optimizers, world), world)
        read["load"] = loaded - read["verify"]
    train(run, run.step + 1)

    def copy(step: int) -> None:
        tree = run.snapshot()
        if world.is_main:
            saver.save(step, *tree, copied=run.plan.sharded)

    sizes = [x.nbytes for x in tree_leaves(run.snapshot()) if isinstance(x, Tensor)]
    try:
        for step in range(run.step, run.step + asked.rounds):
            trainer.recorder.publish()
            check = _seconds(lambda: check_weights(run.optimizers.named.items(), run.step), world)
            copied = _seconds(partial(copy, step), world)
            row = {
                "check": check,
                "copy": copied,
                "write": _seconds(trainer.recorder.publish, world),
            }
            rows.append({"ranks": world.size, "parallel": asked.kind, **row, **read})
            rows[-1]["bytes"] = sum(sizes)
    finally:
        saver.close()
        run.loader.close()
    return world, rows


def _seconds(work: Callable[[], object], world: World) -> float:
    """Returns the time that the slowest rank takes."""
    world.barrier()
    start = time.perf_counter()
    work()
    return float(world.gather(torch.tensor([time.perf_counter() - start])).max())


def main(argv: list[str]) -> None:
    asked = flags.command(Save, argv, prog="python -m bench.save")
    if asked.recipe not in RECIPES:
        raise unknown_name("recipe", asked.recipe, RECIPES)
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        start = distributed.start("cpu")
        path = start.broadcast_object(Path(folder)) / "run"
        if asked.keep is not None:
            path = asked.folder / asked.keep
        world, rows = time_saves(asked, path.absolute())
        world.barrier()
    if not world.is_main:
        return
    lines = []
    for row in rows:
        held = row["check"] + row["copy"]
        figures = (held, row["check"], row["copy"], row["write"])
        rate = f"{row['bytes'] / 1e9:.2f} GB at {row['bytes'] / row['copy'] / 1e9:.1f} GB/s"
        lines.append((*(f"{seconds:.3f}" for seconds in figures), rate))
    records.show("held up, s|check|copy|then written, s|copied", lines)
    if "load" in rows[0]:
        print(f"read: verified in {rows[0]['verify']:.3f} s, loaded in {rows[0]['load']:.3f} s")
    print(records.Writer("cpu").write("save", *rows))


if __name__ == "__main__":
    run_command(main)
