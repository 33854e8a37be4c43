"""Benchmarks the host time of calling our ops, without running a kernel: `python -m bench.host`.

Launches are recorded instead of run, on tiny tensors, so that no GPU is needed and only the time of
Python, torch and our launchers is left. Each op is called straight through its autograd function,
as `runtime.define_op` does in eager mode, and through torch's dispatcher, for comparison. PyTorch's
own op, which does compute, is timed beside it. Triton's own launch is not included.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from unittest import mock

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from torch import Tensor

from bench import records
from bench.timing import Timed, Timer, quantiles
from fastgpt import flags
from fastgpt.errors import UserError, run_command
from fastgpt.kernels import attention, layer_norm
from fastgpt.kernels.runtime import recording

WAYS = {"straight": True, "dispatcher": False}
Op = Callable[..., Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """Times the host's part of calling an op."""

    calls: int = 500
    """Number of calls in each round."""
    rounds: int = 9
    """Number of timed rounds, after one that is not timed."""

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


def time_host(host: Host) -> list[dict]:
    rows, timer = [], Timer("cpu")
    for name, (ours, peer, shapes) in CASES.items():
        for which in ("fwd", "both"):
            inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
            calls = {way: Timed(partial(_call, ours, inputs, which)) for way in WAYS}
            calls["pytorch"] = Timed(partial(_call, peer, inputs, which))
            times: dict[str, list[float]] = {way: [] for way in calls}
            for turn in range(host.rounds + 1):
                for way, timed in calls.items():
                    listens = mock.patch(
                        "fastgpt.kernels.runtime._nobody_listens", return_value=WAYS.get(way)
                    )
                    with recording(90), listens:
                        took, _ = timer.sample(timed, host.calls)
                    times[way] += [took] if turn else []
            rows += [
                {"op": name, "pass": which, "implementation": way, "seconds": quantiles(seconds)}
                for way, seconds in times.items()
            ]
    return rows


def _call(op: Op, inputs: list[Tensor], which: str, _: None) -> None:
    out = op(*inputs)
    if which == "both":
        torch.autograd.grad(out, inputs, out)


def main(argv: list[str]) -> None:
    rows = time_host(flags.parse(Host, argv, prog="python -m bench.host"))
    lines = []
    for row in rows:
        figures = " ".join(f"{1e6 * row['seconds'][p]:.1f}" for p in ("p20", "p50", "p80"))
        lines.append((row["op"], row["pass"], row["implementation"], figures))
    records.show("op|pass|way|microseconds a call (p20, p50, p80)", lines)
    print(records.Writer("cpu").write("host", *rows))


if __name__ == "__main__":
    run_command(main)
