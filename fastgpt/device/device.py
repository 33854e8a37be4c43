"""Kinds of devices and what each can do; precision, compilers and peak speed of this machine."""

import atexit
import functools
import os
import platform
import re
import subprocess
import time
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from fastgpt.device.toolchain import has_compiler, missing_for_triton
from fastgpt.errors import UserError, counted

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

DRIVER = Path("/proc/driver/nvidia/version")
"""File that is there while NVIDIA's driver for Linux is loaded."""

# --- kinds of devices -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kind:
    """Abilities of one kind of device in PyTorch, and which of them a run uses."""

    name: str
    """Name in messages."""
    has_fp64: bool = True
    compiles: Literal["by default", "on request", "never"] = "never"
    """When a run uses torch.compile."""
    kernels: bool = False
    """True if our Triton kernels run there."""
    pins: bool = False
    """True if copies from pinned host memory do not block."""
    backend: str | None = "gloo"
    """Backends of collective operations; None: one process only."""


CPU = Kind("CPU", compiles="on request")
CUDA = Kind("CUDA", compiles="by default", kernels=True, pins=True, backend="cpu:gloo,cuda:nccl")
ROCM = replace(CUDA, name="ROCm", kernels=False)  # RCCL goes by the name of NCCL
XPU = Kind("XPU", pins=True, backend="cpu:gloo,xpu:xccl")
MPS = Kind("MPS", has_fp64=False, backend=None)
KINDS = {"cuda": CUDA, "xpu": XPU, "mps": MPS, "cpu": CPU}
"""Kinds by the type that torch gives their devices, in the order in which `auto` looks for them."""


def kind_of(device: torch.device | str) -> Kind:
    """Returns the kind of a device; in builds of PyTorch for ROCm, `cuda` is an AMD GPU."""
    type = torch.device(device).type
    return ROCM if type == "cuda" and torch.version.hip is not None else KINDS[type]


def pick_device(
    asked: str, flag: str = "--train.device", among: Collection[str] = tuple(KINDS)
) -> str:
    """Returns the type of the device to run on.

    Args:
        asked: a type, or `auto` for the first of `KINDS` that is there.
        flag: the flag that `asked` was given with.
        among: types that the caller supports.

    Raises:
        UserError: the device asked for is missing, or `auto` would leave an NVIDIA GPU unused.
    """
    requested = [type for type in KINDS if type in (among if asked == "auto" else [asked])]
    found = next((type for type in requested if torch.get_device_module(type).is_available()), None)
    why = why_no_cuda() if asked in ("auto", "cuda") and found in ("cpu", None) else None
    if found is None:
        raise UserError(
            f"{flag} is {asked}, but torch {torch.__version__} sees no {KINDS[asked].name} device"
            f" here: {why or 'expected one, its driver and a torch for it'}; or pass {flag} cpu"
        )
    if why:
        raise UserError(f"{why}; or pass {flag} cpu to use the CPU")
    return found


def why_no_cuda() -> str | None:
    """Explains, in PyTorch's words, why torch cannot use this machine's NVIDIA GPU.

    Returns:
        str | None: None if no NVIDIA driver runs, or CUDA_VISIBLE_DEVICES hides all GPUs.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    if hidden or not DRIVER.exists():
        return None
    here = f"this machine has an NVIDIA GPU, but torch {torch.__version__}"
    if torch.version.cuda is None:
        return f"{here} is built without CUDA: install a CUDA build of torch (pytorch.org)"
    try:
        torch.cuda.init()
        said = "see nvidia-smi; a container must be given its GPUs"
    except (RuntimeError, AssertionError) as error:  # an old driver, or no GPU in the container
        said = str(error).split("\n")[0].strip().rstrip(".")
    return f"{here} is built for CUDA {torch.version.cuda} and cannot use it: {said}"


def device_name(device: str) -> str:
    """Returns the device's name, with the number of threads on a CPU."""
    if device == "mps":
        return torch.backends.mps.get_name()
    if device != "cpu":
        return torch.get_device_module(device).get_device_name()
    model = platform.processor() or platform.machine()
    with suppress(OSError):
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        names = re.findall(r"^model name\s*:(.*)", info, re.MULTILINE)
        model = names[0].strip() if names else model
    return f"{model}, {counted(torch.get_num_threads(), 'thread')}"


def fast_bf16(device: str) -> bool:
    """Returns True if the hardware multiplies bf16 natively (on CPUs: AVX-512 BF16 or AMX)."""
    if device == "mps":
        return False  # M1 and M2 emulate it, and PyTorch does not tell them from later ones
    if device != "cpu":
        return torch.get_device_module(device).is_bf16_supported(including_emulation=False)
    most = os.environ.get("ONEDNN_MAX_CPU_ISA", "ALL")  # of the instructions that products use
    if not re.search("ALL|DEFAULT|BF16|FP16|AMX|AVX10", most.upper()):
        return False
    features = torch.cpu.get_capabilities()
    return any(features.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def synchronize(device: str) -> None:
    """Waits until the device has done all work that was queued."""
    torch.get_device_module(device).synchronize()


def peak_memory(device: str) -> dict[str, float]:
    """Returns `peak_memory_gib`, the peak memory of tensors on this rank's GPU; empty on a CPU."""
    if device == "cpu":
        return {}
    # MPS has no figure of the peak: its driver keeps what was freed, until the cache is emptied
    gpu = torch.get_device_module(device)
    peak = gpu.driver_allocated_memory() if device == "mps" else gpu.max_memory_allocated()
    return {"peak_memory_gib": round(peak / 2**30, 3)}


def reset_peak_memory(device: str) -> None:
    """Makes `peak_memory` begin anew, from the bytes that the tensors take now."""
    if device not in ("cpu", "mps"):
        torch.get_device_module(device).reset_peak_memory_stats()


def pick_precision(asked: str, device: str, flag: str = "--train.precision") -> str:
    """Returns `fp32`, `bf16` or `fp16`; raises `UserError` for one that the device lacks."""
    kind = kind_of(device)
    if asked == "auto":
        return "bf16" if fast_bf16(device) else "fp32"
    if asked == "fp16" and kind is CPU:
        raise UserError(f"{flag} is fp16, which needs CUDA: expected fp32 or bf16")
    if asked == "bf16" and kind is MPS and not torch.backends.mps.is_macos_or_newer(14, 0):
        raise UserError(f"{flag} is bf16, which MPS lacks before macOS 14: expected fp32 or fp16")
    return asked


def pick_residual(asked: str, device: str, precision: str) -> bool:
    """Returns True for a residual stream in bf16; `auto` is bf16 on CUDA where autocast is.

    Raises:
        UserError: bf16 is asked for with another precision.
    """
    if asked == "bf16" and precision != "bf16":
        expected = "expected --train.precision bf16"
        raise UserError(f"--train.residual is bf16: {expected}, which is {precision} here")
    return asked == "bf16" or (asked == "auto" and precision == "bf16" and kind_of(device) is CUDA)


def autocast(device: str, precision: str) -> AbstractContextManager:
    """Returns an autocast context: matrix products in `precision`, weights and sums in fp32."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device, dtype=DTYPES[precision])


# --- compilers ------------------------------------------------------------------------------------


def pick_compile(asked: str, device: str, ranks: int = 1) -> tuple[bool, str]:
    """Returns whether to use torch.compile, and a warning if it cannot be used as asked.

    Raises:
        UserError: it is asked for on a kind of device where it is never used, or CUDA graphs where
            there is no GPU or several ranks.
    """
    kind = kind_of(device)
    if asked == "graphs" and (kind is not CUDA or ranks > 1):
        got = f"got {ranks} on {kind.name}"
        raise UserError(f"--train.compile is graphs: expected one rank on CUDA, {got}")
    if asked == "on" and kind.compiles == "never":
        raise UserError(f"--train.compile is on: expected auto or off on {kind.name}")
    if asked == "off" or (asked == "auto" and kind.compiles != "by default"):
        return False, ""
    if not has_compiler():
        return False, "no C++ compiler was found (CXX, g++, clang++): torch.compile is off"
    if kind is not CPU and (missing := missing_for_triton()):
        return False, f"{missing}; torch.compile is off"
    return True, ""


def compile_options(device: str, asked: str) -> dict[str, Any]:
    """Returns the options of torch.compile for a kind of device and `--train.compile`.

    On CUDA kernels that do not depend on each other, such as the casts of all weights, are launched
    together (docs/benchmarks/counts.md).
    """
    # on a CPU Inductor's own random numbers take several times as long as PyTorch's
    options: dict[str, Any] = {"fallback_random": True} if kind_of(device) is CPU else {}
    if kind_of(device) is CUDA:
        from fastgpt.kernels.graphs import MERGED  # imports Inductor

        end_compile_workers_at_exit()
        options = {"combo_kernels": True, "post_grad_custom_post_pass": MERGED}
    return options | ({"triton.cudagraphs": True} if asked == "graphs" else {})


@functools.cache
def end_compile_workers_at_exit() -> None:
    """Makes this process kill Inductor's compile workers at its end.

    PyTorch asks them to end and waits for one that hangs, up to 300 s (pytorch/pytorch#189290).
    """
    from torch._inductor import async_compile

    def end() -> None:
        for pool in async_compile._pool_set:
            if isinstance(process := getattr(pool, "process", None), subprocess.Popen):
                process.kill()

    atexit.register(end)  # runs before what the import above has registered


def eager(compiled: bool) -> AbstractContextManager:
    """Returns a context for texts, whose lengths differ: each would be compiled if a model is.

    PyTorch's own context imports torch._dynamo, so there is none where nothing is compiled.
    """
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


# --- speed ----------------------------------------------------------------------------------------


def shares(device: str, ranks: int) -> float:
    """Returns the peak of `ranks` processes relative to one: a GPU each, or shared CPU cores."""
    if device != "cpu":
        return float(ranks)
    return min(float(ranks), max(1.0, (os.cpu_count() or 1) / torch.get_num_threads()))


def measured_peak(device: str, dtype: torch.dtype, seconds: float | None = None) -> float:
    """Measures the FLOP/s of a large square matrix product, the peak that MFU is relative to.

    It also resets the device's peak memory.

    Args:
        seconds: time to spend; by default 0.1 on a CPU, where that is many products, else 0.5.
    """
    seconds = (0.1 if device == "cpu" else 0.5) if seconds is None else seconds
    n, found = 1024 if device == "cpu" else 8192, None
    while found is None:
        with suppress(torch.OutOfMemoryError):
            found = _measured_with(n, device, dtype, seconds)
        n //= 2
    reset_peak_memory(device)
    return found


def _measured_with(n: int, device: str, dtype: torch.dtype, seconds: float) -> float:
    """Measures what `measured_peak` returns with matrices (n, n)."""
    from fastgpt.kernels import linear  # imports Triton, for which --help need not wait

    a, b = (torch.randn(n, n).to(device, dtype) for _ in range(2))
    times, end = [], 0.0
    while len(times) < 2 or time.perf_counter() < end:
        start = time.perf_counter()
        linear(a, b)
        synchronize(device)
        times.append(time.perf_counter() - start)
        end = end or time.perf_counter() + seconds
    # the first call initializes libraries; other programs only make the others slower
    return 2 * n**3 / min(times[1:])
