"""Steps that are one function for all lanes: operands seen as a dtype, result written (9.4.1)."""

from collections.abc import Callable
from typing import Any

import numpy as np

from simgpu.executor.build import Build
from simgpu.executor.errors import UnknownPtxError
from simgpu.executor.formats import F16, F32, F64
from simgpu.executor.machine import Machine, Step
from simgpu.executor.ptx import BOOL, U8, U16, U32, U64, Instruction
from simgpu.executor.state import Mask

TYPES = {"pred": BOOL, "b16": U16, "u16": U16, "s16": np.dtype("i2"), "b32": U32, "u32": U32,
         "s32": np.dtype("i4"), "f32": F32, "b64": U64, "u64": U64, "s64": np.dtype("i8"),
         "f64": F64, "f16": F16, "bf16": U16, "s8": np.dtype("i1"), "u8": U8}  # fmt: skip


def plain(dtypes: tuple[Any, ...], result: Any, f: Callable[..., Any]) -> Any:
    """Builder: destination, then sources, each seen as one of `dtypes`."""

    def build(b: Build, instruction: Instruction) -> Step:
        to, *args = instruction.args
        assert isinstance(to, int)
        slots = [b.slot(arg, dtype) for arg, dtype in zip(args, dtypes, strict=True)]
        views = [_view(b.program.dtypes[slot], dtype) for slot, dtype in zip(slots, dtypes)]
        out = b.program.dtypes[to]
        if out.itemsize != result.itemsize:  # 9.4.1: a destination that is wider is extended
            widen, f_ = np.dtype(f"{result.kind}{out.itemsize}"), f
            return plain(dtypes, widen, lambda *x: f_(*x).astype(widen))(b, instruction)
        cast = None if result == out else out

        def step(m: Machine, mask: Mask) -> None:
            R = m.R
            x = [R[s] if v is None else v(R[s]) for s, v in zip(slots, views)]
            y = f(*x)
            m.put(to, y if cast is None else y.view(cast), mask)

        return step

    return build


def _view(slot: np.dtype, dtype: np.dtype) -> Callable[[Any], Any] | None:
    """Returns the cast of a register to a `dtype` (9.4.1: low bits of a wider one), or None."""
    if slot == dtype:
        return None
    if slot.itemsize > dtype.itemsize:
        low = np.dtype(f"u{dtype.itemsize}")
        return lambda x: x.astype(low).view(dtype)
    if slot.itemsize < dtype.itemsize:
        raise UnknownPtxError(f"a register of {slot.itemsize} bytes read as {dtype}")
    return lambda x: x.view(dtype)
