"""Spec of `dropout`, which is random and has no kernel."""

import math

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from torch import Tensor

from ..spec import Make, Problem, Spec, Work, rows, work
from .op import dropout

P = 0.2
"""Probability of dropping an element."""


def inputs(s: Problem, make: Make) -> dict[str, Tensor]:
    return {"x": make(*rows(s), s["N"])}


def bytes_moved(s: Problem, itemsize: int) -> Work:
    """Counts the bytes moved: x and y in the forward, dy and dx in the backward."""
    n = math.prod(rows(s)) * s["N"] * itemsize
    return work((0, 2 * n), (0, 2 * n))


def complaints(inputs: dict[str, Tensor], y: Tensor) -> list[str]:
    """Lists what is wrong: elements not dropped with probability P, or the others not scaled up."""
    x = inputs["x"].detach()
    if (y.shape, y.dtype) != (x.shape, x.dtype):
        return [f"output 0: {y.dtype} {tuple(y.shape)}, expected {x.dtype} {tuple(x.shape)}"]
    keep = y != 0
    share, n = keep.float().mean().item(), x.numel()
    wrong = []
    if abs(share - (1 - P)) > 5 * (P * (1 - P) / n) ** 0.5 + 2**-16:
        wrong.append(f"output 0: kept {share:.5f} of the elements, expected {1 - P}")
    if not torch.allclose(y[keep].float(), x[keep].float() / (1 - P), rtol=1e-2):
        wrong.append(f"output 0: the elements kept are not x / {1 - P}")
    return wrong


DROPOUT = Spec(
    name="dropout",
    op=dropout,
    ref=F.dropout,
    eager=F.dropout,
    inputs=inputs,
    options=lambda problem, device: {"p": P},
    launches=lambda s: (),  # it has no kernel
    variants=lambda arch: iter(()),
    work=bytes_moved,
    problems={"typical": {"M": 300, "N": 101}},
    sizes={"cpu": {"shakespeare-char": {"M": 4096, "N": 1536}}, "cuda": {}},
    random=complaints,
)
SPECS = (DROPOUT,)
