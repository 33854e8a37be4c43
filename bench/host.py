"""What a call of one of our ops costs the host before anything runs: `python -m bench.host`.

Launches are recorded and not run, on tensors of a few numbers, so that no GPU is needed and what is
left is Python, torch and our launchers: straight to the autograd function, as `runtime.define_op`
calls an op in eager mode, and through torch's dispatcher, as it would without that. PyTorch's own
op, which does compute, stands beside it. Triton's own launch is not in it.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench import records
from bench.timing import quantiles
from fastgpt.errors import UserError, shown_in_one_line
from fastgpt.kernels import attention, layer_norm
from fastgpt.kernels.runtime import recording

WAYS = {"straight": True, "dispatcher": False}
Op = Callable[..., Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """Times the host's part of a call."""

    calls: int = 500
    """In each round."""
    rounds: int = 9

    def __post_init__(self) -> None:
        if self.calls < 1 or self.rounds < 2:
            raise UserError(
                f"--calls is {self.calls}, --rounds is {self.rounds}: expected 1 or more, 2 or more"
            )


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def pytorch_layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias)


CASES: dict[str, tuple[Op, Op, list[tuple[int, ...]]]] = {
    "layer_norm": (layer_norm, pytorch_layer_norm, [(4, 16), (16,), (16,)]),
    "attention": (attention, sdpa, [(1, 4, 1, 16)] * 3),
}


def seconds(op: Op, inputs: list[Tensor], backward: bool, calls: int) -> float:
    """Of one call."""
    start = time.perf_counter()
    for _ in range(calls):
        out = op(*inputs)
        if backward:
            torch.autograd.grad(out, inputs, out)
    return (time.perf_counter() - start) / calls


def measure(host: Host) -> list[dict]:
    rows = []
    for name, (ours, peer, shapes) in CASES.items():
        for backward in (False, True):
            inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
            times: dict[str, list[float]] = {way: [] for way in (*WAYS, "pytorch")}
            for turn in range(host.rounds + 1):
                for way, taken in times.items():
                    with (
                        recording(90),
                        mock.patch(
                            "fastgpt.kernels.runtime._nobody_listens", return_value=WAYS.get(way)
                        ),
                    ):
                        op = peer if way == "pytorch" else ours
                        took = seconds(op, inputs, backward, host.calls)
                    if turn:
                        taken.append(took)
            for way, taken in times.items():
                rows.append(
                    {
                        "op": name,
                        "pass": "both" if backward else "fwd",
                        "implementation": way,
                        "seconds": quantiles(taken),
                    }
                )
    return rows


def main(argv: list[str]) -> None:
    rows = measure(tyro.cli(Host, prog="python -m bench.host", args=argv))
    table = Table("op", "pass", "way", "microseconds a call (p20, p50, p80)")
    for row in rows:
        figures = (f"{1e6 * row['seconds'][p]:.1f}" for p in ("p20", "p50", "p80"))
        table.add_row(row["op"], row["pass"], row["implementation"], " ".join(figures))
    Console().print(table)
    print(records.write("host", "cpu", rows))


if __name__ == "__main__":
    with shown_in_one_line():
        main(sys.argv[1:])
