"""The runtime of all Triton ops: where kernels run, how they are launched and registered.

An op is registered once, by `define_op`, and is then one node to torch.compile. Launchers allocate
with `torch.empty` alone (tests replace it by one that puts poisoned rows around every buffer) and
launch through `launch` alone, which counts launches and can record them in place of running them:
`kernels.aot` compiles exactly what it records. Nothing here imports triton, which macOS lacks.
"""

import functools
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack

# Triton itself reads the variable when it is imported, so a later change of it means nothing.
INTERPRETING = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")

LAUNCHES: Counter[str] = Counter()
"""Number of launches of each kernel in this process, which tests assert on."""


# --- where ----------------------------------------------------------------------------------------


def runs_kernels(device: torch.device) -> bool:
    """True if Triton kernels run on tensors of `device`: CUDA, or anything being interpreted."""
    return device.type == "cuda" or (INTERPRETING and device.type == "cpu") or _recorder is not None


def arch(device: torch.device) -> int:
    """Compute capability as one number (90 for sm_90); 0 in the interpreter."""
    if _recorder is not None:
        return _recorder.arch
    return _cuda(device.index)[0] if device.type == "cuda" else 0


def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of `device`; 2 in the interpreter, so that loops over rows loop."""
    if _recorder is not None:
        return 132
    return _cuda(device.index)[1] if device.type == "cuda" else 2


@functools.cache
def _cuda(index: int | None) -> tuple[int, int]:
    properties = torch.cuda.get_device_properties(index)
    return 10 * properties.major + properties.minor, properties.multi_processor_count


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The dtype that autocast wants of a matrix product of x; that of x where autocast is off."""
    kind = x.device.type
    if kind in ("cuda", "cpu") and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x.dtype


def without_autocast(x: Tensor) -> torch.autocast:
    """A context in which products of tensors on x's device keep the dtype that they are given."""
    return torch.autocast("cpu" if x.is_meta else x.device.type, enabled=False)


# --- launch ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Launch:
    """A recorded launch: a `@triton.jit` function and what it was called with."""

    kernel: Any
    args: tuple[Any, ...]
    meta: dict[str, Any]
    grid: tuple[int, ...]


class _Recorder:
    def __init__(self, arch: int) -> None:
        self.arch = arch
        self.launches: list[Launch] = []


_recorder: _Recorder | None = None


@contextmanager
def recording(arch: int) -> Iterator[list[Launch]]:
    """Collects launches as if the device were of `arch`, and runs none; use with meta tensors."""
    global _recorder
    before, _recorder = _recorder, _Recorder(arch)
    try:
        yield _recorder.launches
    finally:
        _recorder = before


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
    """Launches `kernel[grid](*args, **meta)` on the device and current stream of args[0], a tensor.

    `meta` holds the constexprs and num_warps, num_stages.
    """
    if _recorder is not None:
        _recorder.launches.append(Launch(kernel, args, meta, grid))
        return
    LAUNCHES[kernel.__name__] += 1
    device = args[0].device
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        kernel[grid](*args, **meta)
    else:
        with torch.cuda.device(device):
            kernel[grid](*args, **meta)


# --- registration ---------------------------------------------------------------------------------

NAMESPACE = "fastgpt"


def define_op(
    schema: str,
    impl: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    setup_context: Callable[[Any, tuple[Any, ...], Any], None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Registers an op with torch and returns the function that calls it with positional arguments.

    A call crosses torch's dispatcher only where something listens there: torch.compile, fake
    tensors, dispatch modes (selective checkpointing, FLOP counters). Otherwise it goes straight to
    an autograd function of the same `setup_context` and `backward`, which costs the host less.

    Args:
        schema: "name(Tensor x, ...) -> (Tensor, ...)", as torch.library.define takes it; outputs
            must not alias inputs or each other.
        impl: runs the op on CUDA tensors, and on CPU tensors in the interpreter.
        fake: shapes, strides and dtypes of the outputs, for the same arguments.
        setup_context: (ctx, inputs, output); saves what `backward` needs.
        backward: (ctx, *gradients of the outputs, None where there is none), one gradient an
            input; without it, a backward through the op raises.

    Returns:
        Callable: the op.
    """
    name, parenthesis, rest = schema.partition("(")
    qualified = f"{NAMESPACE}::{name}"
    torch.library.define(qualified, parenthesis + rest, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(qualified, ("cpu", "cuda"), impl)
    torch.library.register_fake(qualified, fake)

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)
        if setup_context is not None:
            setup_context(ctx, inputs, output)

    def refuse(ctx: Any, *gradients: Tensor | None) -> NoReturn:
        raise NotImplementedError(f"{qualified} cannot be differentiated: no double backward")

    derivative = backward or refuse
    torch.library.register_autograd(qualified, derivative, setup_context=setup)
    dispatched = getattr(getattr(torch.ops, NAMESPACE), name)

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, /, *args: Any) -> Any:
            output = impl(*args)
            setup(ctx, args, output)
            return output

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, /, *gradients: Tensor | None) -> Any:
            return derivative(ctx, *gradients)

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling() or not _nobody_listens(args):
            return dispatched(*args)
        return Function.apply(*args) if torch.is_grad_enabled() else impl(*args)

    return call


def undisturbed(*args: Any) -> bool:
    """True if nothing but autograd would see a call with these arguments at torch's dispatcher.

    While launches are recorded nobody is asked: what is recorded is what runs where none listens.
    """
    if _recorder is not None:
        return True
    if torch._C._len_torch_dispatch_stack() or peek_interpreter_stack():
        return False
    plain = (Tensor, torch.nn.Parameter)
    return all(type(x) in plain for x in args if isinstance(x, Tensor))


def _nobody_listens(args: tuple[Any, ...]) -> bool:
    """True if a call may go straight to the kernels."""
    return undisturbed(*args) and runs_kernels(args[0].device)
