"""Launches of compiled Triton kernels: their PTX is executed, on the memory of the device."""

import ctypes
import sys
import traceback
from collections import Counter
from typing import Any

from simgpu.executor import Compiled, FaultError, UnknownPtxError, run_ptx
from simgpu.executor.launch import built
from simgpu.executor.memory import Region

LAUNCH_FAILED = 719


class Launch(ctypes.Structure):
    """A launch as the driver's stand-in hands it over (SimLaunch in native/sim.h)."""

    _fields_ = [
        ("ptx", ctypes.c_char_p), ("name", ctypes.c_char_p), ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("params", ctypes.POINTER(ctypes.c_void_p)),
    ]  # fmt: skip


SIZES = {1: ctypes.c_uint8, 2: ctypes.c_uint16, 4: ctypes.c_uint32, 8: ctypes.c_uint64}
launched: Counter[str] = Counter()
"""How often each kernel was launched in this process."""
_cuda: Any = None
_callback: Any = None


def install() -> None:
    """Makes the driver's stand-in call `_launch`."""
    global _cuda, _callback
    _cuda = ctypes.CDLL("libcuda.so.1")
    _cuda.simgpu_owner.argtypes = [ctypes.c_void_p]
    _cuda.simgpu_host.argtypes, _cuda.simgpu_host.restype = [ctypes.c_void_p], ctypes.c_void_p
    size = ctypes.POINTER(ctypes.c_size_t)
    _cuda.simgpu_block.argtypes = [ctypes.c_void_p, size, size]
    _callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Launch))(_launch)
    _cuda.simgpu_set_launcher(_callback)


def _launch(pointer: Any) -> int:
    """Runs one launch; an error ends in the code of a failed launch, and its text on stderr."""
    launch = pointer.contents
    name = launch.name.decode()
    launched[name] += 1
    try:
        _execute(launch)
    except BaseException as error:
        what = f"{type(error).__name__}: {error}"
        if not isinstance(error, FaultError | UnknownPtxError):
            what = traceback.format_exc()
        print(f"simgpu: kernel {name} failed: {what}", file=sys.stderr, flush=True)
        return LAUNCH_FAILED
    return 0


def _execute(launch: Launch) -> None:
    ptx = launch.ptx.decode()
    if launch.block[1] != 1 or launch.block[2] != 1 or launch.block[0] % 32:
        raise NotImplementedError(f"thread blocks of {list(launch.block)} are not executed")
    values, regions = [], []
    for number, (name, dtype) in enumerate(built(ptx).program.params):
        value = SIZES[dtype.itemsize].from_address(launch.params[number]).value
        if dtype.itemsize == 8 and _cuda.simgpu_owner(value) >= 0:
            base, size = ctypes.c_size_t(), ctypes.c_size_t()
            if _cuda.simgpu_block(value, ctypes.byref(base), ctypes.byref(size)):
                at = _cuda.simgpu_host(base.value)
                regions.append(Region(name, at, (size.value,), (1,), 1, (at, size.value)))
            value = _cuda.simgpu_host(value)
        values.append(value)
    compiled = Compiled(ptx, launch.block[0] // 32, launch.shared)
    run_ptx(compiled, list(launch.grid), values, regions=regions)
