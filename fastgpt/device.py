"""Device, precision and compiler of this machine, and its peak speed in matrix products."""

import ctypes
import importlib.util
import json
import os
import platform
import shutil
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

import torch

from fastgpt.errors import UserError, counted
from fastgpt.storage import write_atomically

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def pick_device(asked: str, flag: str = "--train.device") -> str:
    """Returns `cpu` or `cuda`; raises `UserError` if `flag` asks for CUDA and there is none."""
    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if asked == "cuda" and not torch.cuda.is_available():
        raise UserError(
            f"{flag} is cuda, but torch {torch.__version__} sees no CUDA device here: "
            f"expected a GPU with its driver and a CUDA build of torch, or {flag} cpu"
        )
    return asked


def keep_freed_memory() -> None:
    """Tells glibc's allocator to keep freed memory, so that the next step can reuse it.

    By default it returns large blocks to the system, and getting them back costs page faults and
    zeroing: a step of 6 layers of 384 (B=16, T=256, bf16, two AVX-512 cores) took 549 ms instead of
    463 ms. The process then keeps its peak memory. With other allocators this does nothing.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 2**30)
    libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    libc.mallopt(M_TOP_PAD, 2**26)


def device_name(device: str) -> str:
    """Returns the device's name, with the number of threads on a CPU."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip()
            for line in info.read_text().splitlines()
            if line.startswith("model name")
        ]
        model = names[0] if names else model
    return f"{model}, {counted(torch.get_num_threads(), 'thread')}"


def has_fast_bf16(device: str) -> bool:
    """Returns True if the hardware multiplies bf16 natively (on CPUs: AVX-512 BF16 or AMX)."""
    if device == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    features = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return bool(features.get("avx512_bf16") or features.get("amx_bf16") or features.get("bf16"))


def pick_precision(asked: str, device: str) -> str:
    """Returns `fp32`, `bf16` or `fp16`; raises `UserError` for fp16 on a CPU."""
    if asked == "auto":
        return "bf16" if has_fast_bf16(device) else "fp32"
    if asked == "fp16" and device == "cpu":
        raise UserError("--train.precision is fp16, which needs CUDA: expected fp32 or bf16")
    return asked


def autocast(device: str, precision: str) -> AbstractContextManager:
    """Returns an autocast context: matrix products in `precision`, weights and sums in fp32."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device, dtype=DTYPES[precision])


def has_compiler() -> bool:
    """Returns True if torch.compile finds a C++ compiler."""
    return any(shutil.which(name) for name in (os.environ.get("CXX", "c++"), "g++", "clang++"))


def pick_compile(asked: str, device: str) -> tuple[bool, str]:
    """Returns whether to use torch.compile, and a warning if it cannot be used as asked."""
    if asked == "off" or (asked == "auto" and device == "cpu"):
        return False, ""
    if not has_compiler():
        return False, "no C++ compiler was found (CXX, g++, clang++): torch.compile is off"
    if device == "cuda" and importlib.util.find_spec("triton") is None:
        return False, "triton is not installed: torch.compile is off"
    return True, ""


def peak_memory(device: str) -> dict[str, float]:
    """Returns `peak_memory_gib`, the peak memory of tensors on this rank's GPU; empty on a CPU."""
    if device == "cpu":
        return {}
    return {"peak_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3)}


def shares(device: str, ranks: int) -> float:
    """Returns the peak of `ranks` processes relative to one: a GPU each, or shared CPU cores."""
    if device == "cuda":
        return float(ranks)
    return min(float(ranks), max(1.0, (os.cpu_count() or 1) / torch.get_num_threads()))


def peak_flops(
    device: str, precision: str, cache: Path, seconds: float = 1.0
) -> tuple[float, float]:
    """Measures the FLOP/s of a large square matrix product, the peak that MFU is relative to.

    Other programs only make it slower, so the fastest of all measurements is cached.

    Args:
        cache: folder of the cache file, whose keys are device, threads, precision and torch
            version.
        seconds: duration of the first measurement; later ones take a quarter of it.

    Returns:
        tuple[float, float]: the peak, and the share of CPU time that this process's threads got
        while measuring: well below 1 if other programs use the cores, always 1 on CUDA.
    """
    rounded = torch.get_float32_matmul_precision()  # TF32 or not
    key = f"{device_name(device)} {precision} {rounded} torch {torch.__version__}"
    path = cache / "peak_flops.json"
    known = _remembered(path)
    before = known.get(key, 0.0)
    peak, share = measured_peak(device, DTYPES[precision], seconds / 4 if before else seconds)
    if peak > before:
        known[key] = peak
        with suppress(OSError):  # a cache that cannot be written only makes the peak less exact
            cache.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(known, indent=1).encode())
    return max(peak, before), share


def _remembered(path: Path) -> dict[str, float]:
    try:
        known = dict(json.loads(path.read_text()))
        return {key: float(value) for key, value in known.items() if float(value) > 0}
    except (OSError, ValueError, TypeError):
        return {}


def measured_peak(device: str, dtype: torch.dtype, seconds: float) -> tuple[float, float]:
    """Measures what `peak_flops` returns, without the cache."""
    n = 8192 if device == "cuda" else 1024
    a, b = (torch.randn(n, n).to(device, dtype) for _ in range(2))

    def product_seconds() -> float:
        start = time.perf_counter()
        torch.mm(a, b)
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    product_seconds()  # the first call initializes libraries, which can take longer than the rest
    start, used = time.perf_counter(), time.process_time()
    best = product_seconds()
    while time.perf_counter() - start < seconds:
        best = min(best, product_seconds())
    if device == "cuda":
        return 2 * n**3 / best, 1.0
    wall, used = time.perf_counter() - start, time.process_time() - used
    return 2 * n**3 / best, min(1.0, used / wall / torch.get_num_threads())
