"""Counts what executed code does: instructions by pipe, memory sectors, bank conflicts, products.

Everything is counted for each basic block, so that a pass of a loop can be told from the rest.
Instructions are PTX's: the assembler makes fewer or more of them, mostly of moves, addresses and
conversions. An instruction with a predicate that is false for all threads counts: it is issued.
"""

import re
from collections import Counter
from dataclasses import dataclass

import numpy as np

from simgpu.executor.ptx import WARP, Array, Program

SECTOR, BANKS, WORD = 32, 32, 4
"""Bytes of a sector of global memory; banks of shared memory; bytes of a bank's word."""
FIELDS = ("warps", "sectors", "least_sectors", "bytes", "wavefronts", "least_wavefronts",
          "multiply_adds", "touched")  # fmt: skip
"""Counts of each basic block: warps that ran it; 32-byte sectors of global memory that
each warp's access touches, the fewest that hold its bytes, and these bytes; passes over shared
memory's banks, and the fewest without a conflict; multiply-adds of tensor cores. `touched` is of a
whole launch and kept with its first block: the bytes of global memory that it reads or writes, each
once."""

PIPES = (
    ("control", r"bra|ret|exit|bar|barrier|fence|membar|mbarrier|elect|griddepcontrol|nanosleep|"
                r"(wgmma|cp\.async|tcgen05)\.(fence|commit|wait|alloc|dealloc|relinquish)\w*(::\w+)*"),
    ("tensor", r"mma|wgmma|tcgen05\.(mma|cp)"),
    ("memory", r"ld\.(global|shared|local|const)|st|ldmatrix|stmatrix|cp|shfl|atom|red|prefetch|"
               r"tcgen05\.(ld|st)"),
    ("special", r"ex2|lg2|rcp|rsqrt|sqrt|sin|cos|tanh|div(\.\w+)*\.f32|"
                r"cvt(\.r[nzmp]i)(\.\w+)*|cvt(\.\w+)*\.f32\.[su]\d+"),
    ("move", r"mov|cvta|ld\.param"),
    ("fp32", r"(add|sub|mul|fma)(\.\w+)*\.(f32|f32x2|f16|f16x2|bf16|bf16x2)"),
)  # fmt: skip
"""Pipe -> the opcodes that it runs, by the first that fits; all others are integer arithmetic.

Source: CUDA C++ Programming Guide, "Arithmetic Instructions" (throughput): compare, minimum,
maximum, select, logic and packing to 16 bits run at the rate of integers; conversions between
floats and integers at the rate of special functions. The assembler removes most moves.
"""
NAMES = (*(name for name, _ in PIPES), "int")
_PATTERNS = [(name, re.compile(rf"(?:{pattern})(?:\.|$)")) for name, pattern in PIPES]


def pipe_of(op: str) -> str:
    """Returns the pipe that runs an opcode, such as "fp32" for "fma.rn.f32"."""
    return next((name for name, pattern in _PATTERNS if pattern.match(op)), "int")


@dataclass(frozen=True, slots=True)
class Loop:
    """An innermost loop: basic blocks `first` to `last`, which ends with the jump back."""

    first: int
    last: int
    source: str
    """Source line of its jump back."""

    @property
    def blocks(self) -> slice:
        return slice(self.first, self.last + 1)


class Counters:
    """Counts of one or more launches of a kernel; passed to `run_ptx` or `execute` it adds to them.

    Attributes:
        table: counts (fields, basic blocks).
        thread_blocks: thread blocks that were run.
    """

    def __init__(self) -> None:
        self.thread_blocks = self._here = 0

    def start(self, program: Program, warps: int) -> None:
        """Gets ready for a launch, which has to be of the same kernel as those before."""
        if hasattr(self, "program") and self.program is not program:
            raise ValueError(f"counters of {self.program.name} cannot count {program.name}")
        if not hasattr(self, "program"):
            self.program, self.warps = program, warps
            self.table = np.zeros((len(FIELDS), len(program.blocks)), np.int64)

    def finish(self, touched: int) -> None:
        """Counts what only a whole launch tells."""
        self._here = 0
        self.add("touched", touched)

    # --- counting ---------------------------------------------------------------------------------

    def enter(self, block: int, warps: int) -> None:
        """Some warps run a basic block; what is counted next belongs to it."""
        self._here = block
        self.add("warps", warps)

    def add(self, field: str, amount: int | np.integer) -> None:
        self.table[FIELDS.index(field), self._here] += amount

    def in_global(self, threads: int, lanes: Array, addresses: Array, size: int) -> None:
        """Counts an access of `size` bytes a lane, of so many threads, to global memory."""
        by_warp = _grouped(threads, lanes, addresses, WARP)
        held = _distinct(by_warp)[1].sum(1) * size
        self.add("sectors", _distinct(np.where(by_warp < 0, -1, by_warp // SECTOR))[1].sum())
        self.add("least_sectors", (-(-held // SECTOR)).sum())
        self.add("bytes", held.sum())

    def in_shared(self, threads: int, lanes: Array, addresses: Array, size: int) -> None:
        """Counts an access of `size` bytes a lane, of so many threads, to shared memory.

        Up to 4 bytes a lane the warp accesses as one, 8 bytes by halves, 16 bytes by quarters; a
        row of ldmatrix is 16 bytes of a lane. The lanes of such a part take as many passes as the
        fullest bank has different words for them.
        """
        words = max(1, size // WORD)
        first = _grouped(threads, lanes, addresses, WARP // words)[:, :, None]
        asked = np.where(first < 0, -1, first // WORD + np.arange(words)).reshape(len(first), -1)
        words_of, new = _distinct(asked)
        place = np.arange(len(asked))[:, None] * BANKS + words_of % BANKS
        busy = np.bincount(place[new], minlength=len(asked) * BANKS).reshape(-1, BANKS)
        self.add("wavefronts", busy.max(1).sum())
        self.add("least_wavefronts", (-(-new.sum(1) // BANKS)).sum())

    # --- reading ----------------------------------------------------------------------------------

    def total(self, field: str, blocks: slice = slice(None)) -> int:
        """Returns a field's count in some basic blocks, by default in all."""
        return int(self.table[FIELDS.index(field), blocks].sum())

    def opcodes(self, blocks: slice = slice(None)) -> Counter[str]:
        """Returns the number of warp instructions of each opcode."""
        found: Counter[str] = Counter()
        for block, warps in zip(self.program.blocks[blocks], self.table[0, blocks].tolist()):
            for instruction in block:
                found[instruction.op] += warps
        return found

    def pipes(self, blocks: slice = slice(None)) -> Counter[str]:
        """Returns the number of warp instructions of each pipe."""
        found: Counter[str] = Counter(dict.fromkeys(NAMES, 0))
        for op, count in self.opcodes(blocks).items():
            found[pipe_of(op)] += count
        return found

    def barriers(self, blocks: slice = slice(None)) -> float:
        """Returns the number of times that a thread block met at a barrier."""
        ops = self.opcodes(blocks).items()
        return sum(n for op, n in ops if op.startswith(("bar.sync", "barrier.sync"))) / self.warps

    def loops(self, least: int = 16) -> list[Loop]:
        """Returns the innermost loops of at least so many instructions, by place in the code."""
        found = []
        for number, block in enumerate(self.program.blocks):
            if block and block[-1].mods[0] == "bra":
                target = self.program.target(block[-1])
                if target <= number:
                    found.append(Loop(target, number, block[-1].source))
        inner = [
            x for x in found
            if not any(y != x and x.first <= y.first and y.last <= x.last for y in found)
        ]  # fmt: skip
        sizes = [sum(map(len, self.program.blocks[x.blocks])) for x in inner]
        return [x for x, size in zip(inner, sizes) if size >= least]

    def passes(self, loop: Loop) -> float:
        """Returns how often thread blocks went through a loop, all together."""
        return int(self.table[0, loop.last]) / self.warps


def _grouped(threads: int, lanes: Array, addresses: Array, width: int) -> Array:
    """Returns addresses (groups, width) of each `width` lanes that follow each other; -1: none."""
    whole = np.full(threads, -1, np.int64)
    whole[lanes] = addresses.astype(np.int64)
    return whole.reshape(-1, width)


def _distinct(values: Array) -> tuple[Array, Array]:
    """Returns rows sorted, and where in them a value is new: the first of equals, but not -1."""
    rows = np.sort(values, 1)
    new = rows >= 0
    new[:, 1:] &= rows[:, 1:] != rows[:, :-1]
    return rows, new
