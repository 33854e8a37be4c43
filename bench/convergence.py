"""Compares a run on our kernels with one on PyTorch's ops: `python -m bench.convergence`.

Both start from the same weights and take the same batches, one step each in turn. If every op is
right, their losses stay together; the record has both curves.
"""

import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from bench import records
from bench.implementations import PLAIN_OPS, TINY, TRITON_OPS
from fastgpt import flags
from fastgpt.config.config import Config, DataConfig, OptimConfig, TrainConfig
from fastgpt.config.model import ModelConfig
from fastgpt.device import device
from fastgpt.errors import UserError, run_command
from fastgpt.kernels.runtime import runs_kernels
from fastgpt.train.build import build
from fastgpt.train.plan import resolve
from fastgpt.train.trainer import train

LAST = 20
"""Number of last steps whose mean losses are compared."""
BOUND = {"fp32": 1e-4, "bf16": 5e-3, "fp16": 5e-3}
"""Largest relative difference of the two runs' mean losses, by number format."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Convergence:
    """Trains twice, with Triton kernels and with plain PyTorch, and compares the losses."""

    steps: int = 200
    """Number of steps of each run."""
    budget: float = float("inf")
    """Seconds after which no further step is taken; at least 40 steps are."""
    tiny: bool = False
    """Train a tiny network, for a rehearsal in Triton's interpreter."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Number format of matrix products, as for `--train.precision`."""
    out: Path | None = None
    """Folder of the record; by default bench/results/local/<device>."""


def config_of(run: Convergence, on: Literal["cpu", "cuda"], folder: Path) -> Config:
    """Builds the settings of a GPT of 6 layers of width 384, or of a tiny one, for both runs."""
    model = ModelConfig(num_layers=6, num_heads=6, dim=384, context=512)
    source, batch = "builtin", 16
    if run.tiny:
        model = ModelConfig(**TINY)
        text = folder / "text.txt"
        text.write_text("the cat sat on the mat, and the dog sat on the log. " * 40)
        source, batch = str(text), 2
    return Config(
        steps=run.steps,
        model=model,
        data=DataConfig(source=source),
        optim=OptimConfig(lr=1e-3, warmup_steps=20),
        train=TrainConfig(
            batch_tokens=batch * model.context,
            device=on,
            precision="fp32" if run.tiny else run.precision,
            compile="off",
        ),
    )


def curves(config: Config, budget: float) -> tuple[dict[str, list[float]], dict[str, dict]]:
    """Trains with and without our kernels; returns losses and ops by the name of the run."""
    runs = {
        name: build(resolve(replace(config, ops=ops), warn=lambda _: None), lambda _: None)
        for name, ops in (("triton", TRITON_OPS), ("torch", PLAIN_OPS))
    }
    losses: dict[str, list[float]] = {name: [] for name in runs}
    end = time.perf_counter() + budget
    for step in range(config.steps):
        if step >= 2 * LAST and time.perf_counter() > end:
            break
        for name, run in runs.items():
            train(run, run.step + 1)
            losses[name].append(run.finite_loss()[0])
    for run in runs.values():
        run.loader.close()
    return losses, {name: run.model.ops.names for name, run in runs.items()}


def compare(losses: dict[str, list[float]], precision: str) -> dict:
    """Builds the record: the difference at the end, and whether it is within its bound."""
    ours, plain = (sum(losses[name][-LAST:]) / LAST for name in ("triton", "torch"))
    difference = abs(ours - plain) / plain
    return {
        "steps": len(losses["torch"]),
        "first": losses["torch"][0],
        "last": {"triton": ours, "torch": plain},
        "relative_difference": difference,
        "bound": BOUND[precision],
        "passed": difference <= BOUND[precision] and plain < losses["torch"][0],
        "losses": losses,
    }


def run(asked: Convergence) -> dict:
    """Trains, records and returns the comparison.

    Raises:
        UserError: kernels do not run here, or the steps are too few to compare.
    """
    on: Any = device.pick_device("auto", "--device", ("cuda", "cpu"))
    if not runs_kernels(torch.device(on)):
        raise UserError("Triton kernels need CUDA; on a CPU set TRITON_INTERPRET=1")
    if asked.steps < 2 * LAST:
        raise UserError(f"--steps is {asked.steps}: expected {2 * LAST} or more")
    with tempfile.TemporaryDirectory() as name:
        config = config_of(asked, on, Path(name))
        losses, ops = curves(config, asked.budget)
    precision = device.pick_precision(config.train.precision, on)
    row = {**compare(losses, precision), "precision": precision, "ops": ops}
    records.Writer(on, asked.out).write("convergence", row)
    return row


def main(argv: list[str]) -> int:
    asked = flags.command(Convergence, argv, prog="python -m bench.convergence")
    row = run(asked)
    last = row["last"]
    print(
        f"loss after {row['steps']} of {asked.steps} steps: triton {last['triton']:.5f},"
        f" torch {last['torch']:.5f}; relative difference {row['relative_difference']:.1e},"
        f" bound {row['bound']:.0e}"
    )
    return 0 if row["passed"] else 1


if __name__ == "__main__":
    run_command(main)
