"""The tolerance of all kernel tests: an error at most about twice that of PyTorch's own ops.

The truth is the same computation in a wider dtype. For every output and every gradient:

    largest error       <= 2 x PyTorch's + one ulp of the largest true value
    relative L2 error   <= 1.5 x PyTorch's + half an ulp of 1

A gradient whose true value is 0 throughout is a sum of terms that cancel, as that of a query that
sees one key. Its bounds are relative to such a term: the largest output times the largest gradient.

So no tolerance has to be chosen: `tests/parity.py` asserts the rule, and `bench` does not time an
implementation that breaks it. bf16 alone hides errors of 1 %: test fp32 as well.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

Op = Callable[..., Tensor | tuple[Tensor, ...]]
Draw = Callable[[int, Tensor], Tensor]

# In fp32 the error comes from the order of summation, not from rounding the result; PyTorch's may
# happen to be 0. A sum of n terms, added one after the other, errs by about sqrt(n) ulp. Eight ulp
# are 1e-6: four orders of magnitude below an error of 1 %.
TERMS = 64
ULPS = {torch.float32: 8, torch.bfloat16: 1, torch.float16: 1}


def ulp(value: float, dtype: torch.dtype) -> float:
    """Returns the distance from `value` to the next larger number of `dtype`."""
    tiny = torch.finfo(dtype).smallest_normal
    return torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(max(abs(value), tiny)))


def complaints(
    got: Mapping[str, Tensor], torchs: Mapping[str, Tensor], truth: Mapping[str, Tensor],
    dtype: torch.dtype, terms: int = TERMS,
) -> list[str]:  # fmt: skip
    """Returns a line for each output or gradient whose error exceeds the tolerance.

    Args:
        got: results of the op that is checked.
        torchs: PyTorch's own results, in `dtype`.
        truth: results in a wider dtype.
        dtype: dtype of the op's inputs.
        terms: longest sum that the op adds one term after the other, if more than 64. It counts in
            fp32 alone.
    """
    wrong = []
    ulps = max(ULPS[dtype], math.sqrt(terms)) if dtype is torch.float32 else ULPS[dtype]
    tops = {name: true.abs().max().item() for name, true in truth.items()}
    outputs, gradients = (
        max((top for name, top in tops.items() if name.startswith(kind)), default=0.0)
        for kind in ("output", "gradient")
    )
    for name, true in truth.items():
        top = tops[name] or (outputs * gradients if name.startswith("gradient") else 0.0)
        largest, l2 = errors(got[name], true, top)
        torch_largest, torch_l2 = errors(torchs[name], true, top)
        for kind, error, bound in (
            ("largest error", largest, 2 * torch_largest + ulps * ulp(top, dtype)),
            ("relative L2 error", l2, 1.5 * torch_l2 + ulps * ulp(1.0, dtype) / 2),
        ):
            if not error <= bound:  # so that NaN is wrong
                shape = tuple(true.shape)
                wrong.append(f"{name} {shape} {dtype}: {kind} {error:.3e} > {bound:.3e}")
    return wrong


def errors(a: Tensor, true: Tensor, unit: float = 0.0) -> tuple[float, float]:
    """Returns the (largest absolute, relative L2) error of `a`, by `unit` where `true` is 0."""
    difference = a.to(true.dtype) - true
    norm = true.norm().item() or unit * math.sqrt(true.numel())
    return difference.abs().max().item(), difference.norm().item() / (norm or 1.0)


def outputs_and_gradients(
    op: Op, inputs: Mapping[str, Tensor], dtype: torch.dtype, draw: Draw | None, **options: object
) -> dict[str, Tensor]:
    """Runs `op` on `inputs` in `dtype`; its results are `output 0`, ..., `gradient of x`, ...

    Args:
        op: called as op(*inputs, **options); returns a tensor or several.
        inputs: tensors; all floating ones get a gradient, if `draw` is given.
        dtype: the inputs are cast to it, strides kept, so the op meets the layout it was given.
        draw: (number, output) -> upstream gradient; None for an op without a backward.
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
    differentiable = {name: x for name, x in leaves.items() if x.requires_grad}
    gradients = torch.autograd.grad(outputs, list(differentiable.values()), upstream)
    of_inputs = zip(differentiable, gradients, strict=True)
    return named | {f"gradient of {name}": dx for name, dx in of_inputs}


def faults(
    implementations: Sequence[Op], inputs: Mapping[str, Tensor], dtype: torch.dtype, *,
    gradients: bool = True, terms: int = TERMS,
) -> list[str]:  # fmt: skip
    """Returns the `complaints` about an op for `inputs` cast to a dtype, and random gradients.

    Args:
        implementations: ours, PyTorch's own, and the reference, the truth in a wider dtype.
        gradients: False for an op without a backward.
    """

    def draw(_: int, y: Tensor) -> Tensor:
        # the same output gradient for all three, whatever their dtypes
        return torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.device)

    inputs = {k: x.to(dtype) if x.is_floating_point() else x for k, x in inputs.items()}
    wide = torch.float64 if dtype is torch.float32 else torch.float32
    got, plain, truth = (
        outputs_and_gradients(f, inputs, of, draw if gradients else None)
        for f, of in zip(implementations, (dtype, dtype, wide), strict=True)
    )
    return complaints(got, plain, truth, dtype, terms)
