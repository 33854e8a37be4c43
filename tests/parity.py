"""The one tolerance rule: an op may be about as far from the truth as PyTorch itself is.

The truth is the same computation in a wider dtype. For every output and every gradient:

    largest error       <= 2 x PyTorch's + one ulp of the largest true value
    relative L2 error   <= 1.5 x PyTorch's + half an ulp of 1

so that no test chooses a tolerance. bf16 alone hides what is wrong by 1 %: test fp32 as well.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Op = Callable[..., Tensor | tuple[Tensor, ...]]

# In fp32 the error is the order of summation and not the rounding of the result; PyTorch's may
# happen to be 0. Eight ulp are 1e-6: four orders of magnitude below an error of 1 %.
ULPS = {torch.float32: 8, torch.bfloat16: 1, torch.float16: 1}


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


def ulp(value: float, dtype: torch.dtype) -> float:
    """Distance from `value` to the next larger number of `dtype`."""
    tiny = torch.finfo(dtype).smallest_normal
    return torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(max(abs(value), tiny)))


def assert_parity(
    op: Op,
    ref: Op,
    inputs: Mapping[str, Tensor],
    *,
    eager: Op | None = None,
    truth_dtype: torch.dtype = torch.float64,
    **options: object,
) -> None:
    """Holds outputs and gradients of `op` against the rule.

    Args:
        op: called as op(*inputs, **options); returns a tensor or several.
        ref: the same contract; the truth when run in `truth_dtype`.
        inputs: all floating ones, of one dtype, get a gradient; the names appear in the message.
        eager: PyTorch's own op, or its plain operations, in the inputs' dtype; `ref` by default.
        truth_dtype: float64, or float32 where the inputs are narrower and large.
        options: handed on to each of the three.
    """
    dtype = next(x.dtype for x in inputs.values() if x.is_floating_point())
    got = _outputs_and_gradients(op, inputs, dtype, options)
    torchs = _outputs_and_gradients(eager or ref, inputs, dtype, options)
    truth = _outputs_and_gradients(ref, inputs, truth_dtype, options)
    assert got.keys() == truth.keys(), f"{list(got)} instead of {list(truth)}"
    wrong = []
    for name, true in truth.items():
        a, b = got[name], torchs[name]
        assert (a.shape, a.dtype) == (b.shape, b.dtype), f"{name}: {a.shape} {a.dtype}"
        largest, l2 = _errors(a, true)
        torch_largest, torch_l2 = _errors(b, true)
        top = true.abs().max().item()
        for kind, error, bound in (
            ("largest error", largest, 2 * torch_largest + ULPS[dtype] * ulp(top, dtype)),
            ("relative L2 error", l2, 1.5 * torch_l2 + ULPS[dtype] * ulp(1.0, dtype) / 2),
        ):
            if not error <= bound:  # so that NaN is wrong
                wrong.append(f"{name} {tuple(a.shape)} {dtype}: {kind} {error:.3e} > {bound:.3e}")
    assert not wrong, "\n".join(wrong)


def _errors(a: Tensor, true: Tensor) -> tuple[float, float]:
    """(largest absolute, relative L2) error of `a`."""
    difference = a.to(true.dtype) - true
    norm = true.norm().item()
    return difference.abs().max().item(), difference.norm().item() / (norm or 1.0)


def _outputs_and_gradients(
    op: Op, inputs: Mapping[str, Tensor], dtype: torch.dtype, options: dict[str, object]
) -> dict[str, Tensor]:
    # detach keeps the strides: the op under test meets the very layout it was given.
    leaves = {
        name: x.detach().to(dtype).requires_grad_() if x.is_floating_point() else x
        for name, x in inputs.items()
    }
    outputs = op(*leaves.values(), **options)
    outputs = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
    narrow = next(x.dtype for x in inputs.values() if x.is_floating_point())
    generator = torch.Generator().manual_seed(1)  # the same for op, eager and truth
    upstream = [
        awkward(*y.shape, dtype=narrow, device=y.device, generator=generator).to(y.dtype)
        for y in outputs
    ]
    wanted = {name: x for name, x in leaves.items() if x.requires_grad}
    gradients = torch.autograd.grad(outputs, list(wanted.values()), upstream)
    return {
        **{f"output {i}": y.detach() for i, y in enumerate(outputs)},
        **{f"gradient of {name}": dx for name, dx in zip(wanted, gradients, strict=True)},
    }
