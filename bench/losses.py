"""The head and its loss on a CPU, chunked and whole: `python -m bench.losses`.

Forward and backward of GPT-2's head. Both run in one process, in turn, for their times, with freed
memory kept as the trainer keeps it; each runs in a process of its own for its memory, with glibc's
own settings: kept blocks would make 6.2 GB of the whole form's 2.9. That is the largest resident
size; the part before the first step (Python, PyTorch, the inputs) is given apart.
"""

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
import tyro
from rich.console import Console
from rich.table import Table

from bench import records
from fastgpt import device
from fastgpt.errors import shown_in_one_line
from kernels import linear_cross_entropy

Step = Callable[[], torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Losses:
    """Times and memory of the head's loss, forward and backward."""

    tokens: int = 4096
    dim: int = 768
    vocab: int = 50_257
    """Padded to a multiple of 64."""
    precision: tuple[str, ...] = ("fp32", "bf16")
    """bf16 is autocast's, with weights in fp32."""
    rounds: int = 5
    memory_of: str = ""
    """Prints the bytes of one implementation, `whole` or `chunked`, and nothing else."""


def whole(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, vocab: int) -> torch.Tensor:
    """All logits at once, in PyTorch's own ops."""
    logits = F.linear(x, weight)[..., :vocab]
    return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten())


def chunked(
    x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, vocab: int
) -> torch.Tensor:
    return linear_cross_entropy(x, weight, targets, valid_vocab=vocab)


IMPLEMENTATIONS = {"whole": whole, "chunked": chunked}


def prepared(losses: Losses, precision: str) -> dict[str, Step]:
    """A step, forward and backward, of each implementation on the same inputs; its loss."""
    torch.manual_seed(0)
    padded = -(-losses.vocab // 64) * 64
    x = torch.randn(4, losses.tokens // 4, losses.dim, requires_grad=True)
    weight = torch.nn.Parameter(torch.empty(padded, losses.dim).normal_(std=0.02))
    targets = torch.randint(losses.vocab, (4, losses.tokens // 4))

    def step(op: Callable[..., torch.Tensor]) -> torch.Tensor:
        x.grad = weight.grad = None
        with device.autocast("cpu", precision):
            loss = op(x, weight, targets, losses.vocab)
        loss.backward()
        return loss.detach()

    return {name: lambda op=op: step(op) for name, op in IMPLEMENTATIONS.items()}


def resident() -> int:
    """The largest resident size of this process so far, in bytes; getrusage's has the parent's."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if "VmHWM" in line))


def print_memory(losses: Losses) -> None:
    """Two steps of one implementation; bytes before and after, for the process that asked."""
    step = prepared(losses, losses.precision[0])[losses.memory_of]
    before = resident()
    for _ in range(2):
        step()
    print(before, resident())


def memory(losses: Losses, name: str, precision: str) -> tuple[int, int]:
    """(bytes before the first step, largest) of a process of its own."""
    flags = [f"--tokens={losses.tokens}", f"--dim={losses.dim}", f"--vocab={losses.vocab}"]
    command = [sys.executable, "-m", "bench.losses", *flags, "--memory-of", name]
    done = subprocess.run(
        [*command, "--precision", precision], capture_output=True, text=True, check=True
    )
    before, largest = done.stdout.split()[-2:]
    return int(before), int(largest)


def rows_of(losses: Losses, precision: str) -> list[dict]:
    steps = prepared(losses, precision)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    results: dict[str, float] = {}
    for turn in range(losses.rounds + 1):
        for name in list(steps)[:: 1 if turn % 2 else -1]:
            start = time.perf_counter()
            results[name] = steps[name]().item()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    rows = []
    for name, times in seconds.items():
        before, largest = memory(losses, name, precision)
        rows.append(
            {
                "op": "linear_cross_entropy",
                "shape": [losses.tokens, losses.dim, losses.vocab],
                "dtype": precision,
                "implementation": name,
                "loss": results[name],
                "seconds": records.quantiles(times),
                "all_seconds": times,
                "bytes_before": before,
                "bytes_largest": largest,
            }
        )
    return rows


def main(argv: list[str]) -> None:
    losses = tyro.cli(Losses, prog="python -m bench.losses", args=argv)
    if losses.memory_of:
        print_memory(losses)
        return
    device.keep_freed_memory()
    table = Table(
        "dtype", "implementation", "loss", "seconds", "speed", "MB", "over it", "MB of it"
    )
    every = []
    for precision in losses.precision:
        rows = rows_of(losses, precision)
        first = rows[0]
        for row in rows:
            own = row["bytes_largest"] - row["bytes_before"]
            first_own = first["bytes_largest"] - first["bytes_before"]
            table.add_row(
                precision,
                row["implementation"],
                f"{row['loss']:.6f}",
                f"{row['seconds']['p50']:.2f}",
                f"{first['seconds']['p50'] / row['seconds']['p50']:.2f}x",
                f"{row['bytes_largest'] / 1e6:.0f}",
                f"{row['bytes_largest'] / first['bytes_largest']:.3f}",
                f"{own / 1e6:.0f} ({own / first_own:.3f})",
            )
        every += rows
    Console().print(table)
    print(records.write("losses", "cpu", every))


if __name__ == "__main__":
    with shown_in_one_line():
        main(sys.argv[1:])
