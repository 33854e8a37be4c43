"""Rotary positions: pairs of numbers of each query and key, turned by angles that grow with place.

Shapes
    q: (B, T, H, D)   k: (B, T, K, D)   cos, sin: (T, D/2) fp32, of each place's angles
Math
    (a, b) -> (a cos - b sin, a sin + b cos); pair i is (i, i + D/2), interleaved (2i, 2i + 1).
    The gradient is turned back by the same angle. Traffic: docs/kernels.md.
Source
    Su et al. 2021, arXiv:2104.09864, eq. 34.

On CUDA, and on CPU tensors in Triton's interpreter, `kernels.rotary.device` runs, once for q and k
together; anywhere else the plain form does. All math is fp32. Dtypes are kept, under autocast, too:
q and k come out of a product that autocast has cast. A gradient of a gradient raises.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..checks import DTYPES, MAX_D
from ..runtime import define_op, runs_kernels, undisturbed

# --- reference ------------------------------------------------------------------------------------


def _turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    a, b = (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    pairs = (a * cos - b * sin, a * sin + b * cos)  # (B, T, H, D/2) each
    out = torch.stack(pairs, dim=-1).flatten(-2) if interleaved else torch.cat(pairs, dim=-1)
    return out.to(x.dtype)


def rotary_ref(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """The contract of `rotary` in plain PyTorch, never in place; takes fp64 as well."""
    return _turned(q, cos, sin, interleaved), _turned(k, cos, sin, interleaved)


# --- op -------------------------------------------------------------------------------------------
# The kernels are imported when first run: triton is missing on macOS and slow to import.


def _turn(*args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
    from .device import rotary_turn

    return rotary_turn(*args, **options)


def _fwd(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Any, ...]:
    return _turn(q, k, cos, sin, interleaved=interleaved)


def _bwd(
    cos: Tensor, sin: Tensor, dq: Tensor | None, dk: Tensor | None, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of q and of k; empty where there is none to turn back."""
    given = [d for d in (dq, dk) if d is not None]
    one, two = _turn(*given, *(None,) * (2 - len(given)), cos, sin,
                     interleaved=interleaved, conjugate=True)  # fmt: skip
    none = torch.empty(0, device=cos.device) if two is None else two
    return (none, one) if dq is None else (one, none)


def _bwd_fake(
    cos: Tensor, sin: Tensor, dq: Tensor | None, dk: Tensor | None, interleaved: bool
) -> tuple[Tensor, Tensor]:
    one, two = (cos.new_empty(0) if d is None else d.new_empty(d.shape) for d in (dq, dk))
    return one, two


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, cos, sin, ctx.interleaved = inputs
    ctx.save_for_backward(cos, sin)


def _backward(ctx: Any, dq: Tensor | None, dk: Tensor | None) -> tuple[Any, ...]:
    if dq is None and dk is None:
        return (None,) * 5
    one, two = _rotary_bwd(*ctx.saved_tensors, dq, dk, ctx.interleaved)
    return None if dq is None else one, None if dk is None else two, None, None, None


_rotary_bwd = define_op(
    "rotary_backward(Tensor cos, Tensor sin, Tensor? dq, Tensor? dk, bool interleaved) "
    "-> (Tensor, Tensor)",
    _bwd,
    _bwd_fake,
)
_rotary = define_op(
    "rotary(Tensor q, Tensor k, Tensor cos, Tensor sin, bool interleaved) -> (Tensor, Tensor)",
    _fwd,
    lambda q, k, *_: (q.new_empty(q.shape), k.new_empty(k.shape)),
    setup_context=_setup_context,
    backward=_backward,
)


# --- in place -------------------------------------------------------------------------------------


def _write(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    """Turns q and k where they are, unseen by autograd."""
    if runs_kernels(q.device):
        _turn(q, k, cos, sin, interleaved=interleaved, inplace=True)
        return
    for x in (q, k):
        if x is not None:
            x.detach().copy_(_turned(x.detach(), cos, sin, interleaved))


class _InPlace(torch.autograd.Function):
    """Turns one tensor where it is; autograd takes no more than one where they are views."""

    @staticmethod
    def forward(ctx: Any, /, *args: Any) -> Tensor:
        x, cos, sin, ctx.interleaved = args
        _write(x, None, cos, sin, ctx.interleaved)
        ctx.mark_dirty(x)
        ctx.save_for_backward(cos, sin)
        return x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, /, *gradients: Tensor) -> tuple[Any, ...]:
        (dx,) = gradients
        cos, sin = ctx.saved_tensors
        if runs_kernels(dx.device):
            dx, _ = _turn(dx, None, cos, sin, interleaved=ctx.interleaved, conjugate=True)
        else:
            dx = _turned(dx, cos, -sin, ctx.interleaved)
        return dx, None, None, None


def _in_place(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor]:
    if torch.compiler.is_compiling() or not undisturbed(q, k, cos, sin):
        raise ValueError(
            "inplace: expected False where calls are traced: torch.compile, fake tensors, "
            "dispatch modes"
        )
    for name, x in (("q", q), ("k", k)):
        if x.stride(3) != 1 or _overlaps_itself(x):
            raise ValueError(
                f"{name}: with inplace expected a contiguous last dimension and no element twice, "
                f"got {tuple(x.shape)} with strides {x.stride()}"
            )
    if _may_overlap(q, k):
        raise ValueError("q, k: with inplace expected no memory in common, got some, or unclear")
    related = {"q": (q, _base(q)), "k": (k, _base(k))}
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in sum(related.values(), ())):
        _write(q, k, cos, sin, interleaved)
        increment_version([x for x in (q, k) if not x.is_inference()])
        return q, k
    for name, tensors in related.items():
        if any(x.is_leaf and x.requires_grad for x in tensors):
            raise ValueError(
                f"{name}: with inplace expected a tensor computed from others, got a leaf that "
                "requires grad, or a view of one"
            )
    H, K = q.shape[2], k.shape[2]
    if (
        q._base is not None
        and q._base is k._base
        and q.stride() == k.stride()
        and k.storage_offset() - q.storage_offset() == H * q.stride(2)
    ):
        both = _InPlace.apply(_view(q, H + K), cos, sin, interleaved)
        return both.narrow(2, 0, H), both.narrow(2, H, K)
    q, k = (_InPlace.apply(_view(x, x.shape[2]), cos, sin, interleaved) for x in (q, k))
    return q, k


def _base(x: Tensor) -> Tensor:
    """What x is a view of, or x."""
    return x if x._base is None else x._base


def _view(x: Tensor, heads: int) -> Tensor:
    """x, or if it is a view the view of its base, from x's place on, that has so many heads.

    Autograd lets no output of split() be written to; this is a view of its own.
    """
    if x._base is None:
        return x
    B, T, _, D = x.shape
    return x._base.as_strided((B, T, heads, D), x.stride(), x.storage_offset())


def _dimensions(x: Tensor) -> list[tuple[int, int]]:
    """(stride, size) of those that have more than one place, the widest stride first."""
    return sorted(((s, n) for s, n in zip(x.stride(), x.shape) if n > 1), reverse=True)


def _reach(dimensions: list[tuple[int, int]]) -> int:
    """Elements from the first to the last."""
    return 1 + sum(stride * (size - 1) for stride, size in dimensions)


def _overlaps_itself(x: Tensor) -> bool:
    dimensions = _dimensions(x)
    inner = [_reach(dimensions[i + 1 :]) for i in range(len(dimensions))]
    return any(stride < reach for (stride, _), reach in zip(dimensions, inner, strict=True))


def _may_overlap(q: Tensor, k: Tensor) -> bool:
    """False if the strides show that no element belongs to both; every split of a tensor does."""
    if q.numel() == 0 or k.numel() == 0:
        return False
    gap, rest = divmod(k.data_ptr() - q.data_ptr(), q.element_size())
    of_q, of_k = _dimensions(q), _dimensions(k)
    while not (gap >= _reach(of_q) or gap + _reach(of_k) <= 0):
        # within one step of the widest stride both must lie, before they are looked at alone
        if not of_q or not of_k or rest or of_q[0][0] != of_k[0][0]:
            return True
        step = of_q[0][0]
        of_q, of_k = of_q[1:], of_k[1:]
        if gap + step < _reach(of_q) or gap + _reach(of_k) > step:
            return True
    return False


# --- public ---------------------------------------------------------------------------------------


def rotary(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    """q and k with each pair of numbers turned by its place's angle.

    With `inplace` q and k are written over, and what is returned shares their memory. They may be
    views of one projection, slices or outputs of `split`, in any order. Where autograd records,
    take the other parts of the projection as slices (`qkv[:, :, n:]`), or afterwards: torch refuses
    what came out of the same `split` once a part was written to. Nothing that some operation saved
    for its backward may be written over; torch notices, and raises in that backward.

    Args:
        q: (B, T, H, D), fp32 | fp16 | bf16, D even, up to 256; any strides, read in place where the
            last dimension is contiguous.
        k: (B, T, K, D), dtype of `q`.
        cos: (T, D/2) fp32; takes no gradient.
        sin: (T, D/2) fp32; takes no gradient.
        interleaved: pairs are neighbours, (2i, 2i + 1), and not (i, i + D/2).
        inplace: see above. Not under torch.compile or other tracing.

    Returns:
        tuple[Tensor, Tensor]: q and k turned, dtypes kept; contiguous unless `inplace`.

    Raises:
        ValueError: a shape, dtype or device is not as above; or `inplace` where calls are traced,
            or of tensors with memory in common, elements that are not apart, or of leaves that
            require grad.
    """
    _check(q, k)
    for name, x in (("cos", cos), ("sin", sin)):
        _check_angles(name, x, q)
    if inplace:
        return _in_place(q, k, cos, sin, interleaved)
    if not runs_kernels(q.device):
        return rotary_ref(q, k, cos, sin, interleaved=interleaved)
    return _rotary(q, k, cos, sin, interleaved)


def _check(q: Tensor, k: Tensor) -> None:
    for name, x in (("q", q), ("k", k)):
        if x.dim() != 4 or x.shape[2] < 1:
            raise ValueError(f"{name}: expected (B, T, heads, D), got {tuple(x.shape)}")
    D = q.shape[3]
    if D % 2 or not 2 <= D <= MAX_D:
        raise ValueError(f"q: expected an even head dimension from 2 to {MAX_D}, got {D}")
    if (*k.shape[:2], k.shape[3]) != (*q.shape[:2], D):
        B, T = q.shape[:2]
        raise ValueError(f"k: expected ({B}, {T}, K, {D}) as q, got {tuple(k.shape)}")
    if q.dtype not in DTYPES:
        raise ValueError(f"q: expected fp32, fp16 or bf16, got {q.dtype}")
    if k.dtype != q.dtype:
        raise ValueError(f"k: expected {q.dtype} as q, got {k.dtype}")
    if k.device != q.device:
        raise ValueError(f"k: expected {q.device} as q, got {k.device}")


def _check_angles(name: str, x: Tensor, q: Tensor) -> None:
    T, D = q.shape[1], q.shape[3]
    if x.shape != (T, D // 2):
        partial = " (turning a part of D is not supported)" if x.shape[-1:] < (D // 2,) else ""
        raise ValueError(f"{name}: expected ({T}, {D // 2}), got {tuple(x.shape)}{partial}")
    if x.dtype != torch.float32:
        raise ValueError(f"{name}: expected fp32, got {x.dtype}")
    if x.device != q.device:
        raise ValueError(f"{name}: expected {q.device} as q, got {x.device}")
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name}: expected a tensor that requires no grad; it gets none")
