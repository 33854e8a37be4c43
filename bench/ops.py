"""The CPU's own ops beside PyTorch's, in turn: `python -m bench.ops`."""

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from rich.console import Console
from rich.table import Table

from bench import records
from fastgpt import ops
from fastgpt.device import DTYPES
from fastgpt.errors import shown_in_one_line
from kernels.dropout import dropout

ATTENTION = (("bf16", 0.0), ("bf16", 0.2), ("fp32", 0.0))
SHAPES = ((16, 256, 6, 64), (24, 64, 4, 32), (2, 1024, 12, 64))
"""(B, T, H, D)."""
ROUNDS = 15


def timed(step: Callable[[], torch.Tensor]) -> tuple[float, float]:
    """Seconds of a forward, and of its backward."""
    start = time.perf_counter()
    out = step()
    middle = time.perf_counter()
    out.backward(torch.ones_like(out))
    return middle - start, time.perf_counter() - middle


def beside(case: dict[str, Any], steps: dict[str, Callable[[], torch.Tensor]]) -> list[dict]:
    """A row for each implementation; their order alternates, and the first round is not kept."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for turn in range(ROUNDS + 1):
        for name in list(steps)[:: 1 if turn % 2 else -1]:
            times = timed(steps[name])
            if turn:
                seconds[name].append(times)
    return [
        {
            **case,
            "implementation": name,
            "forward_seconds": records.quantiles([forward for forward, _ in times]),
            "backward_seconds": records.quantiles([backward for _, backward in times]),
        }
        for name, times in seconds.items()
    ]


def attention_rows() -> list[dict]:
    rows = []
    for B, T, H, D in SHAPES:
        for dtype, p in ATTENTION:
            packed = torch.randn(B, T, 3 * H * D).to(DTYPES[dtype]).requires_grad_()

            def step(op: Callable[..., torch.Tensor], packed=packed, H=H, D=D, p=p) -> torch.Tensor:
                q, k, v = packed.unflatten(-1, (-1, D)).split(H, dim=2)
                return op(q, k, v, dropout_p=p)

            case = {"op": "attention", "shape": [B, T, H, D], "dtype": dtype, "dropout": p}
            names = ("blocked", "sdpa")
            rows += beside(case, {name: partial(step, ops.ATTENTION[name]) for name in names})
    return rows


def dropout_rows() -> list[dict]:
    x = torch.randn(4096, 1536, dtype=torch.bfloat16, requires_grad=True)
    steps = {"lanes": lambda: dropout(x, 0.2), "torch": lambda: F.dropout(x, 0.2)}
    return beside({"op": "dropout", "shape": [4096, 1536], "dtype": "bf16", "dropout": 0.2}, steps)


def main() -> None:
    rows = attention_rows() + dropout_rows()
    table = Table("op", "shape", "dtype", "dropout", "implementation", "forward ms", "backward ms")
    for row in rows:
        times = [f"{row[f'{kind}_seconds']['p50'] * 1e3:.2f}" for kind in ("forward", "backward")]
        cells = (row["op"], str(row["shape"]), row["dtype"], str(row["dropout"]))
        table.add_row(*cells, row["implementation"], *times)
    Console().print(table)
    print(records.write("ops", "cpu", rows))


if __name__ == "__main__":
    with shown_in_one_line():
        sys.exit(main())
