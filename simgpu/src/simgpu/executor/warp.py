"""Instructions that exchange values within a warp: shuffles, reductions, elections."""

import numpy as np

from simgpu.executor.atomics import CHANGES
from simgpu.executor.build import Build, opcode, unknown
from simgpu.executor.machine import Machine, Step
from simgpu.executor.ptx import TYPES, WARP, Immediate, Instruction, Vector
from simgpu.executor.state import Mask

ALL = (Immediate(-1), Immediate(0xFFFFFFFF))
"""Masks of members that Triton writes: all threads of the warp."""
FROM = {"bfly": np.bitwise_xor, "idx": lambda own, n: n & 31, "up": np.subtract, "down": np.add}
"""Mode of a shuffle -> the lane that a lane reads, of its own number and the second operand."""


@opcode("shfl.sync")
def _shfl(b: Build, i: Instruction) -> Step:
    """shfl.sync (9.7.9.6), of a whole warp."""
    _, _, mode, _ = i.mods
    to, source, lane, clamp, members = i.args
    if members not in ALL or clamp not in (Immediate(31), Immediate(0)) or not isinstance(to, int):
        raise unknown(i)
    of, by = b.slot(source, np.uint32), b.slot(lane, np.uint32)

    def step(m: Machine, mask: Mask) -> None:
        own = m.tid % WARP
        at = FROM[mode](own, m.R[by].astype(np.int64))
        at = np.where((at < 0) | (at > 31), own, at) + (m.lanes - own)
        m.put(to, m.full(of)[at], mask)

    return step


@opcode("redux.sync")
def _redux(b: Build, i: Instruction) -> Step:
    """redux.sync (9.7.13.8) over the threads of a warp that the third operand names."""
    _, _, name, *mods, kind = i.mods
    to, source, members = i.args
    if mods or not isinstance(to, int):
        raise unknown(i)
    dtype = TYPES[kind]
    f = {"min": np.fmin, "max": np.fmax}[name] if kind == "f32" else CHANGES[name]
    of, who = b.slot(source, np.uint32), b.slot(members, np.uint32)

    def step(m: Machine, mask: Mask) -> None:
        if (m.full(who)[m.index(mask)] != 0xFFFFFFFF).any():
            raise unknown(i)
        values = m.full(of).view(dtype).reshape(-1, WARP)
        m.put(to, np.repeat(f.reduce(values, 1), WARP).view(np.uint32), mask)

    return step


@opcode("elect.sync")
def _elect(b: Build, i: Instruction) -> Step:
    """elect.sync (9.7.13.10): one thread of the warp is chosen, here the first."""
    to, members = i.args
    if members not in ALL or not isinstance(to, Vector):
        raise unknown(i)
    lane, chosen = b.vector(to, np.uint32)

    def step(m: Machine, mask: Mask) -> None:
        if lane is not None:
            m.put(lane, np.uint32(0), mask)
        if chosen is not None:
            m.put(chosen, m.tid % WARP == 0, mask)

    return step


@opcode("bar.warp.sync", "wgmma.fence.sync.aligned", "tcgen05.relinquish_alloc_permit")
def _nothing(b: Build, i: Instruction) -> Step:
    """Executes instructions that change nothing here.

    The threads of a warp that meet (9.7.13.2) are together anyway, accesses to registers
    (9.7.15.7.1) in order, and other blocks of the multiprocessor may allocate whatever they like.
    """
    return lambda m, mask: None
