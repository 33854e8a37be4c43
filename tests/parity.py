"""Helpers of the kernels' tests: the tolerance rule, awkward inputs, guarded buffers."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fastgpt.kernels.parity import TERMS, Op, complaints, outputs_and_gradients
from fastgpt.kernels.runtime import LAUNCHES

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.mT.contiguous().mT,
    "batch-first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "heads-first": lambda x: x.transpose(1, -2).contiguous().transpose(1, -2),
    "every-other-column": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "expanded": lambda x: x[:1].expand(x.shape),
    "odd-offset": lambda x: torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape),
}
"""Memory layouts of a tensor with three dimensions or more, by name; most keep its values."""


def awkward(
    *shape: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    generator: torch.Generator | None = None,
) -> Tensor:
    """Makes random inputs that show errors: none near 0, a mean other than 0, NaN around rows.

    So the rows are neither adjacent nor aligned, and a read past one meets a NaN.
    """
    *rows, N = shape or (1,)
    x = torch.randn(*rows, N, generator=generator)  # drawn on the CPU: the same for every device
    x += torch.where(x < 0, -0.05, 0.35)
    poison = torch.full((math.prod(rows) + 2, N + 3), math.nan, dtype=dtype, device=device)
    strided = poison[1:-1].view(*rows, N + 3)[..., 1 : N + 1].copy_(x)
    return strided if shape else strided[0]


# --- the rule -------------------------------------------------------------------------------------


def results(
    op: Op, in_dtype: torch.dtype, inputs: Mapping[str, Tensor], *, gradients: bool, **options: Any
) -> dict[str, Tensor]:
    """Returns outputs and `gradients` by name; those from above are the same for every op."""
    dtype = next(x.dtype for x in inputs.values() if x.is_floating_point())
    generator = torch.Generator().manual_seed(1)

    def draw(_: int, y: Tensor) -> Tensor:
        return awkward(*y.shape, dtype=dtype, device=y.device, generator=generator)

    return outputs_and_gradients(op, inputs, in_dtype, draw if gradients else None, **options)


def assert_parity(
    op: Op, ref: Op, inputs: Mapping[str, Tensor], *, eager: Op | None = None,
    gradients: bool = True, terms: int = TERMS, **options: object,
) -> None:  # fmt: skip
    """Asserts that outputs and gradients of op(*inputs, **options) keep the tolerance rule.

    The truth is `ref` in fp64; PyTorch's own form is `eager`, by default `ref`, in the dtype of the
    inputs. All floating inputs get a gradient, if the op has any.
    """
    dtype = next(x.dtype for x in inputs.values() if x.is_floating_point())
    called = partial(results, inputs=inputs, gradients=gradients, **options)
    got, torchs, truth = called(op, dtype), called(eager or ref, dtype), called(ref, torch.float64)
    assert got.keys() == truth.keys(), f"{list(got)} instead of {list(truth)}"
    for name, a in got.items():
        b = torchs[name]
        assert (a.shape, a.dtype) == (b.shape, b.dtype), f"{name}: {a.shape} {a.dtype}"
    wrong = complaints(got, torchs, truth, dtype, terms)
    assert not wrong, "\n".join(wrong)


@contextmanager
def launches(*kernels: str) -> Iterator[None]:
    """Asserts that each of `kernels` is launched inside; if none is named, that nothing is."""
    before = Counter(LAUNCHES)
    yield
    seen = LAUNCHES - before
    missing = [name for name in kernels if not seen[name]]
    assert not missing, f"not launched: {', '.join(missing)}; launched: {dict(seen)}"
    assert kernels or not seen, f"launched: {dict(seen)}"


@contextmanager
def guarded() -> Iterator[list[Tensor]]:
    """Fills new buffers with NaN and checks on leaving that no kernel wrote outside of its buffer.

    Inside, `torch.empty`, by which launchers allocate, gives buffers full of NaN between rows of
    NaN (of the least number where the dtype has no NaN): elements that a kernel forgets to write
    are NaN in its output, writes outside are missing in the rows. Yields the buffers.
    """
    empty, buffers, guards = torch.empty, list[Tensor](), list[Tensor]()

    def poisoned(*size, dtype=None, **options) -> Tensor:
        shape = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
        numel, dtype = math.prod(shape), dtype or torch.get_default_dtype()
        margin = 64 * -(-max(64, *shape[-1:]) // 64)  # keeps the alignment of a buffer of its own
        buffer = empty(numel + 2 * margin, dtype=dtype, **options)
        buffer.fill_(math.nan if dtype.is_floating_point else torch.iinfo(dtype).min)
        guards.extend((buffer[:margin], buffer[margin + numel :]))
        buffers.append(buffer[margin : margin + numel].view(shape))
        return buffers[-1]

    with mock.patch.object(torch, "empty", poisoned):
        yield buffers
    for rows in guards:
        kept = rows.isnan() if rows.is_floating_point() else rows == torch.iinfo(rows.dtype).min
        assert kept.all(), "written outside of a buffer"


def several(outputs: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """Returns the outputs of an op as a list, also where there is one only."""
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


def forward_backward(
    op: Op, inputs: Iterable[Tensor], upstream: Iterable[Tensor] | None = None
) -> list[Tensor]:
    """Returns outputs, and gradients of floating inputs; `inputs` keep their strides."""
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    ys = several(op(*leaves))
    if upstream is None:
        generator = torch.Generator().manual_seed(1)
        upstream = [awkward(*y.shape, generator=generator).to(y.device, y.dtype) for y in ys]
    wanted = [x for x in leaves if x.requires_grad]
    return [*(y.detach() for y in ys), *torch.autograd.grad(ys, wanted, list(upstream))]


def backward_only(x: Tensor, factor: float) -> Tensor:
    """Returns `x` with its gradient multiplied by `factor`."""
    return x + (factor - 1) * (x - x.detach())
