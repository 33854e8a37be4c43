"""Holds an op against the one tolerance rule, `kernels.parity`, on inputs that hide nothing."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from fastgpt.kernels.parity import Op, complaints, outputs_and_gradients


def awkward(
    *shape: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    generator: torch.Generator | None = None,
) -> Tensor:
    """Random numbers that hide nothing: none near 0, a mean other than 0, NaN all around each row.

    So the rows are neither adjacent nor aligned, and whoever reads past one meets a NaN.
    """
    *rows, N = shape or (1,)
    x = torch.randn(*rows, N, generator=generator)  # drawn on the CPU: the same for every device
    x += torch.where(x < 0, -0.05, 0.35)
    poison = torch.full((math.prod(rows) + 2, N + 3), math.nan, dtype=dtype, device=device)
    strided = poison[1:-1].view(*rows, N + 3)[..., 1 : N + 1].copy_(x)
    return strided if shape else strided[0]


def assert_parity(
    op: Op,
    ref: Op,
    inputs: Mapping[str, Tensor],
    *,
    eager: Op | None = None,
    truth_dtype: torch.dtype = torch.float64,
    gradients: bool = True,
    **options: object,
) -> None:
    """Holds outputs and gradients of `op` against the rule.

    Args:
        op: called as op(*inputs, **options); returns a tensor or several.
        ref: the same contract; the truth when run in `truth_dtype`.
        inputs: all floating ones, of one dtype, get a gradient; the names appear in the message.
        eager: PyTorch's own op, or its plain operations, in the inputs' dtype; `ref` by default.
        truth_dtype: float64, or float32 where the inputs are narrower and large.
        gradients: False where the op has none.
        options: handed on to each of the three.
    """
    dtype = next(x.dtype for x in inputs.values() if x.is_floating_point())

    def results(op: Op, in_dtype: torch.dtype) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(1)  # the same for op, eager and truth

        def draw(_: int, y: Tensor) -> Tensor:
            return awkward(*y.shape, dtype=dtype, device=y.device, generator=generator)

        return outputs_and_gradients(op, inputs, in_dtype, draw if gradients else None, **options)

    got, torchs = results(op, dtype), results(eager or ref, dtype)
    truth = results(ref, truth_dtype)
    assert got.keys() == truth.keys(), f"{list(got)} instead of {list(truth)}"
    for name, a in got.items():
        b = torchs[name]
        assert (a.shape, a.dtype) == (b.shape, b.dtype), f"{name}: {a.shape} {a.dtype}"
    wrong = complaints(got, torchs, truth, dtype)
    assert not wrong, "\n".join(wrong)
