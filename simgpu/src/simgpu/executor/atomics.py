"""Atomic changes of global memory: atom (9.7.14.6) and red (9.7.14.7).

They are done one after the other in the order of the threads, which is one of the orders that a
GPU may choose: sums of floats may differ from a GPU's by rounding.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from simgpu.executor.build import Build, address_of, opcode, unknown
from simgpu.executor.formats import of_halves
from simgpu.executor.machine import Machine, Step
from simgpu.executor.ptx import CLASSES, TYPES, Instruction
from simgpu.executor.state import Mask

CHANGES: dict[str, Any] = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
    "or": np.bitwise_or, "xor": np.bitwise_xor, "exch": lambda old, x: x,
}  # fmt: skip
COUNTS = {"v2": 2, "v4": 4, "v8": 8}
SCOPES = ("relaxed", "acquire", "release", "acq_rel", "cta", "gpu", "sys")


@opcode("atom.global", "red.global")
def _atomic(b: Build, i: Instruction) -> Step:
    """Atomic operations on an element or several; all are as strong as the strongest here."""
    _, _, *mods, kind = i.mods
    names = [mod for mod in mods if mod not in (*SCOPES, *COUNTS, "noftz")]
    count = next((COUNTS[mod] for mod in mods if mod in COUNTS), 1)
    returns = i.mods[0] == "atom"
    place, *sources = i.args[1:] if returns else i.args
    change, bits = _change(names[0], kind) if len(names) == 1 else None, CLASSES.get(kind)
    if change is None or bits is None or len(sources) != 1 + (names == ["cas"]):
        raise unknown(i)
    slot, offset = address_of(b, place, np.uint64)
    given = [b.vector(source, bits) for source in sources]
    to = b.vector(i.args[0], bits) if returns else []

    def step(m: Machine, mask: Mask) -> None:
        lanes = m.index(mask)
        values = [m.rows(slots, mask, bits) for slots in given]

        def new(old: Any, k: int, lane: int) -> Any:
            return change(old, *(x[k, lane] for x in values))

        old = m.memory.change(lanes, m.addresses(slot, offset, mask), bits, count, new)
        m.put_rows(to, old, mask)

    return step


def _change(name: str, kind: str) -> Callable[..., Any] | None:
    """The operation on the bits of elements; None if it is not known."""
    f, dtype = CHANGES.get(name), TYPES.get(kind)
    if name == "cas":
        return lambda old, expected, new: new if old == expected else old
    if f is None:
        return None
    if kind in ("f16", "bf16", "f16x2", "bf16x2"):
        return of_halves(f, kind)
    if dtype is None:
        return None

    def changed(old: Any, x: Any) -> Any:
        return np.asarray(f(old.view(dtype), x.view(dtype))).astype(dtype).view(old.dtype)

    return changed
