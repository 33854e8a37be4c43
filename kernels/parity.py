"""The one tolerance rule: an op may be about as far from the truth as PyTorch itself is.

The truth is the same computation in a wider dtype. For every output and every gradient:

    largest error       <= 2 x PyTorch's + one ulp of the largest true value
    relative L2 error   <= 1.5 x PyTorch's + half an ulp of 1

so that nobody chooses a tolerance: `tests/parity.py` asserts it, and `bench` refuses a time to what
breaks it. bf16 alone hides what is wrong by 1 %: test fp32 as well.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Op = Callable[..., Tensor | tuple[Tensor, ...]]
Draw = Callable[[int, Tensor], Tensor]

# In fp32 the error is the order of summation and not the rounding of the result; PyTorch's may
# happen to be 0. Eight ulp are 1e-6: four orders of magnitude below an error of 1 %.
ULPS = {torch.float32: 8, torch.bfloat16: 1, torch.float16: 1}


def ulp(value: float, dtype: torch.dtype) -> float:
    """Distance from `value` to the next larger number of `dtype`."""
    tiny = torch.finfo(dtype).smallest_normal
    return torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(max(abs(value), tiny)))


def complaints(
    got: Mapping[str, Tensor],
    torchs: Mapping[str, Tensor],
    truth: Mapping[str, Tensor],
    dtype: torch.dtype,
) -> list[str]:
    """A line for each error beyond the rule; all three are from `outputs_and_gradients`.

    Args:
        got: of the op that is judged.
        torchs: PyTorch's own, in `dtype`.
        truth: in a wider dtype.
        dtype: that the op was given.
    """
    wrong = []
    for name, true in truth.items():
        largest, l2 = errors(got[name], true)
        torch_largest, torch_l2 = errors(torchs[name], true)
        top = true.abs().max().item()
        for kind, error, bound in (
            ("largest error", largest, 2 * torch_largest + ULPS[dtype] * ulp(top, dtype)),
            ("relative L2 error", l2, 1.5 * torch_l2 + ULPS[dtype] * ulp(1.0, dtype) / 2),
        ):
            if not error <= bound:  # so that NaN is wrong
                shape = tuple(true.shape)
                wrong.append(f"{name} {shape} {dtype}: {kind} {error:.3e} > {bound:.3e}")
    return wrong


def errors(a: Tensor, true: Tensor) -> tuple[float, float]:
    """(largest absolute, relative L2) error of `a`."""
    difference = a.to(true.dtype) - true
    norm = true.norm().item()
    return difference.abs().max().item(), difference.norm().item() / (norm or 1.0)


def outputs_and_gradients(
    op: Op, inputs: Mapping[str, Tensor], dtype: torch.dtype, draw: Draw | None, **options: object
) -> dict[str, Tensor]:
    """Runs `op` on `inputs` in `dtype`; its results are `output 0`, ..., `gradient of x`, ...

    Args:
        op: called as op(*inputs, **options); returns a tensor or several.
        inputs: all floating ones get a gradient, if one is drawn.
        dtype: they are cast to it, strides kept: the op meets the very layout it was given.
        draw: (number, output) -> the gradient that comes from above; None: of an op without.
        options: handed on.
    """
    leaves = {
        name: x.detach().to(dtype).requires_grad_(draw is not None) if x.is_floating_point() else x
        for name, x in inputs.items()
    }
    outputs = op(*leaves.values(), **options)
    outputs = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
    named = {f"output {i}": y.detach() for i, y in enumerate(outputs)}
    if draw is None:
        return named
    upstream = [draw(i, y).to(y.dtype) for i, y in enumerate(outputs)]
    wanted = {name: x for name, x in leaves.items() if x.requires_grad}
    gradients = torch.autograd.grad(outputs, list(wanted.values()), upstream)
    of_inputs = zip(wanted, gradients, strict=True)
    return named | {f"gradient of {name}": dx for name, dx in of_inputs}
