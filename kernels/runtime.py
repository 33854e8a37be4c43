"""Runtime of all Triton ops: where kernels run, and how they are launched and registered.

An op is registered once, as an `Op`, and is then one node to torch.compile. All is allocated
with `torch.empty` alone (tests replace it by one that puts poisoned rows around every buffer) and
launched through `launch` alone, which counts launches and can hand them to a fake device instead:
`kernels.aot` compiles exactly what is recorded, `simgpu.executor` runs it on the CPU. Nothing
here imports triton, which macOS lacks.
"""

import functools
import os
import pkgutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.autograd.function import once_differentiable
from torch.nn import Parameter

from . import fences
from .interpreter import patch_bf16

# Triton itself reads the variable when it is imported, so a later change has no effect.
INTERPRETING = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")

H100_PROCESSORS, H100_BYTES = 132, 79 << 30
"""Multiprocessors and memory of an H100, which sizes are chosen for where there is no GPU."""

EXPLICIT = {"enable_fp_fusion": True}
"""Options of every launch. Multiply-adds are fused by default until Triton 3.8; 3.9 warns where
the option is not given, and its successor no longer fuses them."""

LAUNCHES: Counter[str] = Counter()
"""Number of launches of each kernel in this process, which tests assert on."""


# --- where ----------------------------------------------------------------------------------------


def runs_kernels(device: torch.device) -> bool:
    """Returns True if Triton kernels run on `device`: CUDA, or a CPU in the interpreter."""
    return _is_cuda(device) or (INTERPRETING and device.type == "cpu") or _fake_device is not None


def arch(device: torch.device) -> int:
    """Returns the compute capability as one number (90 for sm_90); 0 in the interpreter."""
    if _fake_device is not None:
        return _fake_device.arch
    return _cuda(device.index)[0] if _is_cuda(device) else 0


def family(arch: int | str) -> int:
    """Returns the arch by which tables know `arch`: 100 for 103, 120 for 121, else its own.

    A GPU has the instructions, registers and shared memory of an older one of its family.
    """
    return {103: 100, 121: 120}.get(int(arch), int(arch))


def multiprocessors(device: torch.device) -> int:
    """Returns the number of streaming multiprocessors, in the interpreter 2 to test row loops."""
    if _fake_device is not None:
        return _fake_device.multiprocessors
    return _cuda(device.index)[1] if _is_cuda(device) else 2


def memory(device: torch.device) -> int:
    """Returns the bytes of a CUDA device's memory; a fake device's are an H100's."""
    return H100_BYTES if _fake_device is not None else _cuda(device.index)[2]


def _is_cuda(device: torch.device) -> bool:
    """Returns False for AMD GPUs, which builds of torch for ROCm call `cuda`, too."""
    return device.type == "cuda" and torch.version.hip is None


@functools.cache
def _cuda(index: int | None) -> tuple[int, int, int]:
    found = torch.cuda.get_device_properties(index)
    return 10 * found.major + found.minor, found.multi_processor_count, found.total_memory


def autocast_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype that autocast gives a matrix product of x; x's own if autocast is off."""
    kind = x.device.type
    if kind in ("cuda", "cpu") and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x.dtype


def without_autocast(x: Tensor) -> torch.autocast:
    """Returns a context in which products of tensors on x's device keep their inputs' dtype."""
    return torch.autocast("cpu" if x.is_meta else x.device.type, enabled=False)


# --- launch ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Launch:
    """A recorded launch: a `@triton.jit` function and its arguments."""

    kernel: Any
    args: tuple[Any, ...]
    meta: dict[str, Any]
    grid: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FakeDevice:
    """Takes the place of a CUDA device: records launches, or runs them on the CPU."""

    arch: int
    multiprocessors: int
    launch: Callable[[Launch], None]
    runs: bool
    """False if launches are recorded alone."""


_fake_device: FakeDevice | None = None


@contextmanager
def recording(arch: int) -> Iterator[list[Launch]]:
    """Records launches instead of running them, as if on a device of `arch`; use meta tensors."""
    launches: list[Launch] = []
    with executing(arch, launches.append, H100_PROCESSORS, runs=False):
        yield launches


@contextmanager
def executing(
    arch: int, run: Callable[[Launch], None], multiprocessors: int = 2, *, runs: bool = True
) -> Iterator[None]:
    """Hands launches to `run` as if the device of CPU tensors were of `arch`.

    With two multiprocessors, as in the interpreter, small problems reach the loops over rows.
    """
    global _fake_device
    before, _fake_device = _fake_device, FakeDevice(arch, multiprocessors, run, runs)
    try:
        yield
    finally:
        _fake_device = before


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
    """Launches `kernel[grid](*args, **meta)` on the device and current stream of args[0], a tensor.

    `meta` holds the constexprs and num_warps, num_stages.
    """
    meta = {**meta, **EXPLICIT}
    if _fake_device is None or _fake_device.runs:
        LAUNCHES[kernel.__name__] += 1
    if _fake_device is not None:
        _fake_device.launch(Launch(kernel, args, meta, grid))
        return
    if INTERPRETING:
        patch_bf16()
        kernel[grid](*args, **meta)
        return
    device: torch.device = args[0].device
    elsewhere, sm = device.index != torch.cuda.current_device(), arch(device)
    with (
        torch.cuda.device(device) if elsewhere else nullcontext(),
        fences.compile_with_fences(kernel, sm) if fences.needs_fence(sm) else nullcontext(),
    ):
        kernel[grid](*args, **meta)


# --- registration ---------------------------------------------------------------------------------

NAMESPACE = __name__.partition(".")[0]
"""Namespace of the ops in torch: fastgpt, and for each version that Hugging Face's `kernels` loads
from a folder of `kernels.hub` the name under which it imports that one, so that none clash."""


class Op:
    """Registers an op with torch when it is made, and calls it with positional arguments.

    A call goes through torch's dispatcher only where something hooks into it: torch.compile, fake
    tensors, dispatch modes (selective checkpointing, FLOP counters). Otherwise it goes straight to
    an autograd function with the same `setup_context` and `backward`, which takes less host time.
    """

    def __init__(
        self,
        schema: str,
        impl: Callable[..., Any],
        fake: Callable[..., Any],
        *,
        setup_context: Callable[[Any, tuple[Any, ...], Any], None] | None = None,
        backward: Callable[..., Any] | None = None,
    ) -> None:
        """Registers the op.

        Args:
            schema: "name(Tensor x, ...) -> (Tensor, ...)", as torch.library.define takes it;
                outputs must not alias inputs or each other.
            impl: runs the op on CUDA tensors, and on CPU tensors in the interpreter.
            fake: returns outputs with the right shapes, strides and dtypes, for the same arguments.
            setup_context: (ctx, inputs, output); saves what `backward` needs.
            backward: (ctx, *gradients of the outputs, None where there is none, but not for all)
                -> gradients of the first inputs; without it, a backward through the op raises.
        """
        name, parenthesis, rest = schema.partition("(")
        self.name = f"{NAMESPACE}::{name}"
        self.impl, self.fake, self.setup_context = impl, fake, setup_context
        torch.library.define(self.name, parenthesis + rest, tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.impl(self.name, ("cpu", "cuda"), impl)
        torch.library.register_fake(self.name, self._fake)
        self.dispatched = getattr(getattr(torch.ops, NAMESPACE), name)
        inputs = len(self.dispatched.default._schema.arguments)

        def padded(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
            none = all(gradient is None for gradient in gradients)
            found = () if none else (backward or self._refuse)(ctx, *gradients)
            return *found, *[None] * (inputs - len(found))

        torch.library.register_autograd(self.name, padded, setup_context=self._setup_context)
        methods = {"forward": self._forward, "backward": once_differentiable(padded)}
        self.function: Any = type(name, (torch.autograd.Function,), methods)

    def __call__(self, *args: Any) -> Any:
        if torch.compiler.is_compiling() or not (no_hooks(*args) and runs_kernels(args[0].device)):
            return self.dispatched(*args)
        return self.function.apply(*args) if torch.is_grad_enabled() else self.impl(*args)

    def _fake(self, *args: Any) -> Any:
        _shorten_messages()
        return self.fake(*args)

    def _forward(self, ctx: Any, /, *args: Any) -> Any:
        output = self.impl(*args)
        self._setup_context(ctx, args, output)
        return output

    def _setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)
        if self.setup_context is not None:
            self.setup_context(ctx, inputs, output)

    def _refuse(self, ctx: Any, *gradients: Tensor | None) -> NoReturn:
        raise NotImplementedError(f"{self.name} cannot be differentiated: no double backward")


def like(x: Tensor) -> Tensor:
    """Allocates a contiguous tensor of the shape, dtype and device of x, whatever its strides."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def filled(outputs: Callable[..., Any], launcher: str) -> Callable[..., Any]:
    """Makes the function that runs an op: it allocates the outputs, which a launcher then fills.

    Args:
        outputs: allocates them by `torch.empty`, for the op's arguments.
        launcher: "module:name", called as launcher(*arguments, *outputs). Its module is imported
            when first run, because triton is missing on macOS and slow to import.
    """

    def run(*args: Any) -> Any:
        made = outputs(*args)
        _resolved(launcher)(*args, *((made,) if isinstance(made, Tensor) else made))
        return made

    return run


_resolved = functools.cache(pkgutil.resolve_name)


@functools.cache
def _shorten_messages() -> None:
    """Lets Inductor's message about an op without a lowering name the op alone.

    PyTorch before 2.13 formats it even where nobody reads it, with the code of the op's arguments
    and so of all layers before it: 6 layers take minutes to compile, 12 end in a RecursionError.
    Tracing an op calls this, as the import of Inductor takes a second.
    """
    if torch.__version__ < "2.13":
        from torch._inductor.exc import OperatorIssue

        OperatorIssue.operator_str = staticmethod(lambda target, args, kwargs: str(target))


def no_hooks(*args: Any) -> bool:
    """Returns True if a call may skip torch's dispatcher: only autograd would act on it there.

    While launches are recorded this is True: a recording is of the code that runs without a hook.
    """
    if _fake_device is not None and not _fake_device.runs:
        return True
    if torch._C._len_torch_dispatch_stack() or peek_interpreter_stack():
        return False
    for x in args:
        kind = type(x)
        if kind is not Tensor and kind is not Parameter and isinstance(x, Tensor):
            return False
    return True
