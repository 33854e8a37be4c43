"""tcgen05: instructions of tensor memory and the products into it (9.7.16), of sm_100."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from simgpu.executor.build import Build, address_of, opcode, unknown
from simgpu.executor.errors import LaneError
from simgpu.executor.flight import COLUMNS, LANES, Cells, TensorMemory
from simgpu.executor.machine import Machine, Step
from simgpu.executor.ptx import WARP, Array, Instruction, literal
from simgpu.executor.state import Mask
from simgpu.executor.tensor import product, read_operand, widened

KINDS = {0: "f16", 1: "bf16"}
"""Field of an instruction descriptor -> number format."""

# --- allocation -----------------------------------------------------------------------------------


@opcode("tcgen05.alloc.cta_group::1.sync.aligned")
def _alloc(b: Build, i: Instruction) -> Step:
    slot, offset = address_of(b, i.args[0], np.uint32)
    count = literal(i.args[1])

    def step(m: Machine, mask: Mask) -> None:
        for lane, address in m.each(mask, slot, offset)[::WARP]:
            taken = m.tensor.of(lane).allocated
            column = max((start + width for start, width in taken.items()), default=0)
            if column + count > COLUMNS:
                what = f"tcgen05.alloc of {count} columns: {column} of {COLUMNS} are taken"
                raise LaneError(lane, what)
            taken[column] = count
            at, first = np.array([address], np.uint32), np.array([[column]], np.uint32)
            m.shared.store(np.array([lane]), at, first)

    return step


@opcode("tcgen05.dealloc.cta_group::1.sync.aligned")
def _dealloc(b: Build, i: Instruction) -> Step:
    slot = b.slot(i.args[0], np.uint32)

    def step(m: Machine, mask: Mask) -> None:
        for lane in m.index(mask)[::WARP]:
            column = int(m.full(slot)[lane])
            users, now = m.tensor.of(lane).users, m.epoch[m.block[lane]]
            if any(epoch == now and warp != m.warp[lane] for warp, epoch in users.items()):
                what = "tcgen05.dealloc of what another warp uses, without a barrier"
                raise LaneError(lane, what)
            if m.tensor.of(lane).allocated.pop(column, None) is None:
                raise LaneError(lane, f"tcgen05.dealloc of column {column}, which is not allocated")

    return step


# --- loads and stores -----------------------------------------------------------------------------


def _cells(
    m: Machine, mask: Mask, slot: int, offset: np.unsignedinteger, columns: int, half: int | None
) -> Iterator[tuple[Array, TensorMemory, Cells]]:
    """Yields for each block (which lanes are its own, its memory, the cells that they access).

    Shape .32x32b: a lane for each thread of the warp. Shape .16x32bx2: 16 lanes; the second half of
    the threads accesses the same ones, `half` columns further on (9.7.16.2.3).
    """
    lanes = m.index(mask)
    address = m.addresses(slot, offset, mask).astype(np.int64)
    own, warp = m.tid[lanes] % WARP, m.warp[lanes] % 4
    row, column = address >> 16, address & 0xFFFF
    wrong = np.flatnonzero((row // 32 != warp) | (row % (32 if half is None else 16) != 0))
    if len(wrong):
        bad = wrong[0]
        what = f"accesses lane {row[bad]} of tensor memory, which warp {warp[bad]} cannot"
        raise LaneError(lanes[bad], what)
    if half is not None:
        column, own = column + np.where(own >= 16, half, 0), own % 16
    for lane, first in zip(lanes[::WARP], column[::WARP]):
        memory = m.tensor.of(lane)
        memory.users[int(m.warp[lane])] = int(m.epoch[m.block[lane]])
        memory.check(lane, int(first), int(first) + columns + (half or 0))
    where = column + np.arange(columns)[:, None]
    for block in np.unique(m.block[lanes]):
        mine = m.block[lanes] == block
        yield mine, m.tensor.blocks[block], ((row + own)[mine], where[:, mine])


def _bit(warp: Array) -> Array:
    """Returns the bit of a warp among those that access the same lanes, in `loading`."""
    return np.left_shift(np.uint8(1), (warp // 4).astype(np.uint8))


@opcode("tcgen05.ld.sync.aligned", "tcgen05.st.sync.aligned")
def _access(b: Build, i: Instruction) -> Step:
    """tcgen05.ld: a register is ready when it is read (9.7.16.6.4.5); tcgen05.st is the reverse."""
    args, half, load = list(i.args), None, i.mods[1] == "ld"
    slots = b.vector(args.pop(0 if load else -1), np.uint32)
    slot, offset = address_of(b, args[0], np.uint32)
    if "16x32bx2" in i.mods:
        half = literal(args[1])
    elif "32x32b" not in i.mods:
        raise unknown(i)

    def step(m: Machine, mask: Mask) -> None:
        lanes = m.index(mask)
        values = np.empty((len(slots), len(lanes)), np.uint32) if load else m.rows(slots, mask)
        for mine, memory, cells in _cells(m, mask, slot, offset, len(slots), half):
            lane, warp = lanes[mine][0], m.warp[lanes[mine]]
            if load:
                memory.reads(lane, "tcgen05.ld", cells)
                values[:, mine] = memory.cells[cells]
                memory.loading[cells] |= _bit(warp)
            else:
                memory.writes(lane, "tcgen05.st", cells)
                memory.cells[cells] = values[:, mine]
                memory.storing[cells] = warp + 1
        if load:
            m.put_rows(slots, values, mask)

    return step


@opcode("tcgen05.wait::ld.sync.aligned", "tcgen05.wait::st.sync.aligned")
def _wait(b: Build, i: Instruction) -> Step:
    def step(m: Machine, mask: Mask) -> None:
        for lane in m.index(mask)[::WARP]:
            memory, warp = m.tensor.of(lane), m.warp[lane]
            if i.mods[1] == "wait::ld":
                memory.loading[warp % 4 * WARP : (warp % 4 + 1) * WARP] &= ~_bit(warp)
            else:
                memory.storing[memory.storing == warp + 1] = 0

    return step


# --- products -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape and number format of a product, from its instruction descriptor (9.7.16.4.2)."""

    rows: int
    columns: int
    kind: str
    transposed: tuple[bool, bool]
    """Flags of A and of B."""

    @property
    def lanes(self) -> Array:
        """Lane of tensor memory of each row (9.7.16.10.5): layout D of 128 rows, F of 64."""
        row = np.arange(self.rows)
        return row if self.rows == LANES else row // 16 * 32 + row % 16

    def cells(self, address: int, columns: int) -> Cells:
        """Cells of a matrix of these rows at an address of tensor memory."""
        rows = self.lanes + (address >> 16)
        return rows[:, None], np.arange(columns) + (address & 0xFFFF)


def read_shape(i: Instruction, bits: int) -> Shape:
    """Reads an instruction descriptor; an error if it asks for what Triton does not."""
    rows, kinds = (bits >> 24 & 31) << 4, {bits >> 7 & 7, bits >> 10 & 7}
    if bits >> 4 & 3 != 1 or len(kinds) > 1 or bits & 0x600F or rows not in (64, LANES):
        raise unknown(i)
    flips = bool(bits >> 15 & 1), bool(bits >> 16 & 1)
    return Shape(rows, (bits >> 17 & 63) << 3, KINDS[kinds.pop()], flips)


@opcode("tcgen05.mma.cta_group::1.kind::f16")
def _mma(b: Build, i: Instruction) -> Step:
    """tcgen05.mma: D (tensor memory) = A (shared or tensor memory) B (shared) + D, by a thread."""
    d, d_offset = address_of(b, i.args[0], np.uint32)
    in_shared = isinstance(i.args[1], int)
    a, a_offset = (i.args[1], 0) if in_shared else address_of(b, i.args[1], np.uint32)
    of, asked = b.slot(i.args[2], np.uint64), b.slot(i.args[3], np.uint32)
    keep = b.slot(i.args[4], bool)
    assert isinstance(a, int)

    def step(m: Machine, mask: Mask) -> None:
        for lane in m.index(mask):
            shape, one, held = read_shape(i, int(m.full(asked)[lane])), np.array([lane]), []

            def marks(lanes: Array, units: Array, held: list[Array] = held) -> None:
                m.shared.async_reads(lanes, units, "tcgen05.mma")
                m.shared.pinned[units] += 1
                held.append(units)

            sizes = zip((a, of), (shape.rows, shape.columns), shape.transposed)
            left, right = (
                read_operand(m, one, m.full(slot)[one], True, size, flip, shape.kind, marks)[0]
                if slot == of or in_shared
                else int(m.full(a)[lane] + a_offset)
                for slot, size, flip in sizes
            )
            kept = bool(np.broadcast_to(m.R[keep], m.size)[lane])
            to = int(m.full(d)[lane] + d_offset)
            memory, first = m.tensor.of(lane), to & 0xFFFF
            memory.check(lane, first, first + shape.columns)
            memory.writes(lane, "tcgen05.mma", shape.cells(to, shape.columns))
            if isinstance(left, int):
                memory.reads(lane, "tcgen05.mma", shape.cells(left, 8))
            if kept:
                memory.reads(lane, "tcgen05.mma", shape.cells(to, shape.columns))
            memory.queue.append(_later(m, memory, shape, to, left, right, kept, held))

    return step


def _later(
    m: Machine, memory: TensorMemory, shape: Shape, to: int, left: Array | int, right: Array,
    kept: bool, held: list[Array],
) -> Callable[[], None]:  # fmt: skip
    """A product, to be carried out when something waits for it."""

    def run() -> None:
        a, d = left, shape.cells(to, shape.columns)
        if isinstance(a, int):
            packed = np.ascontiguousarray(memory.cells[shape.cells(a, 8)])
            a = widened(packed.view(np.uint16), shape.kind)
        before = memory.cells[d].view(np.float32)
        result = product(a, right.T, before if kept else np.zeros_like(before))
        memory.cells[d] = result.view(np.uint32)
        for units in held:
            m.shared.pinned[units] -= 1

    return run


@opcode("tcgen05.commit.cta_group::1.mbarrier::arrive::one")
def _commit(b: Build, i: Instruction) -> Step:
    """tcgen05.commit: an mbarrier is told when all products so far are done."""
    slot, offset = address_of(b, i.args[0], np.uint32)

    def step(m: Machine, mask: Mask) -> None:
        for lane, address in m.each(mask, slot, offset):
            m.tensor.of(lane).queue.append(address)
            m.spinning[:] = False

    return step
