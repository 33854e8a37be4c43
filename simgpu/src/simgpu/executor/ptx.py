"""Parser of PTX: text -> basic blocks of instructions, with numbered slots for registers.

Section numbers in this package refer to the PTX ISA 9.1.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from simgpu.executor.errors import UnknownPtxError

Array = npt.NDArray

WARP = 32
"""Threads of a warp."""
U8, U16, U32, U64 = (np.dtype(f"u{n}") for n in (1, 2, 4, 8))
BOOL = np.dtype(bool)
TYPES = {"pred": BOOL, "bf16": U16} | {
    f"{kind}{8 * size}": np.dtype(f"{name}{size}")
    for kind, name in {"b": "u", "u": "u", "s": "i", "f": "f"}.items()
    for size in ((2, 4, 8) if kind == "f" else (1, 2, 4, 8))
}
"""Type of an operand -> dtype of its numbers; numpy has no bf16, which are bits."""
CLASSES = {"pred": BOOL, "f16x2": U32, "bf16x2": U32} | {
    kind: np.dtype(f"u{dtype.itemsize}") for kind, dtype in TYPES.items() if kind != "pred"
}
"""Type of a register, a parameter or an element in memory -> dtype of its bits."""
SPECIAL = ("%tid.x", "%ctaid.x", "%ctaid.y", "%ctaid.z", "%nctaid.x", "%nctaid.y", "%nctaid.z",
           "%laneid")  # fmt: skip
ENDS = ("bra", "ret", "exit", "trap", "bar", "barrier", "mbarrier.try_wait")
"""Instructions that end a basic block: threads may part or wait there."""


@dataclass(frozen=True, slots=True)
class Immediate:
    """A number in the text: an int, or the bits of a float."""

    value: int


@dataclass(frozen=True, slots=True)
class Vector:
    """Several registers in braces; a slot of None is the sink `_`."""

    items: tuple["int | Immediate | None", ...]


@dataclass(frozen=True, slots=True)
class Address:
    """[base + offset]; the base is a slot, or None for an address that is a constant."""

    base: int | None
    offset: int


@dataclass(frozen=True, slots=True)
class Name:
    """A label, a parameter or a variable."""

    text: str


Operand = int | Immediate | Vector | Address | Name


def literal(operand: object) -> int:
    """The value of an operand that is a number in the text."""
    assert isinstance(operand, Immediate), operand
    return operand.value


WRITES_NONE = ("st", "stmatrix", "red.", "call", "trap", "cp", "mbarrier.init",
               "mbarrier.inval", "tcgen05.st", "tcgen05.mma", "tcgen05.commit", "tcgen05.alloc",
               "tcgen05.dealloc")  # fmt: skip
"""Instructions that do not write their first operand."""


@dataclass(slots=True)
class Instruction:
    """One instruction: `@guard op.mods args;`."""

    op: str
    """All of the opcode, such as "ld.global.v4.b32"."""
    args: list[Operand]
    guard: int | None
    """Slot of the predicate."""
    negated: bool
    line: int
    """Line in the PTX, from 1."""
    source: str
    """Source line, such as "forward.py:240"."""
    text: str

    @property
    def mods(self) -> list[str]:
        return self.op.split(".")

    @property
    def type(self) -> str:
        """Last type in the opcode: "f32" of "cvt.rn.bf16x2.f32"."""
        return self.mods[-1]

    @property
    def reads(self) -> Iterator[int]:
        """Slots of the registers that it reads, its predicate first."""
        if self.guard is not None:
            yield self.guard
        for arg in self.args[0 if self.op.startswith(WRITES_NONE) else 1 :]:
            if isinstance(arg, int):
                yield arg
            elif isinstance(arg, Vector):
                yield from (item for item in arg.items if isinstance(item, int))
            elif isinstance(arg, Address) and arg.base is not None:
                yield arg.base

    @property
    def writes(self) -> list[int]:
        """Slots of the registers that it writes; wgmma writes its own when it is waited for."""
        if not self.args or self.op.startswith((*WRITES_NONE, "bra", "bar", "fence", "wgmma")):
            return []
        first = self.args[0]
        items = first.items if isinstance(first, Vector) else (first,)
        return [item for item in items if isinstance(item, int)]


@dataclass(slots=True)
class Program:
    """One kernel."""

    name: str
    params: list[tuple[str, np.dtype]]
    slots: dict[str, int]
    """Register name -> slot."""
    dtypes: list[np.dtype]
    """Slot -> dtype."""
    blocks: list[list[Instruction]]
    labels: dict[str, int]
    """Label -> number of the block that it begins."""
    strings: dict[str, str]
    """Variable in global memory -> its text, which messages of assertions are."""
    rank: list[int] = field(default_factory=list)
    """Basic block -> its place in the order of `flow`, which `Build` fills in."""

    @property
    def instructions(self) -> Iterator[Instruction]:
        return (instruction for block in self.blocks for instruction in block)

    def target(self, branch: Instruction) -> int:
        """Number of the block that a `bra` jumps to."""
        (name,) = branch.args
        assert isinstance(name, Name)
        return self.labels[name.text]


def parse_ptx(text: str) -> Program:
    """Parses the one kernel of a PTX module.

    Raises:
        UnknownPtxError: there is no kernel, or something that no Triton kernel has.
    """
    return _Parser(text).program


NUMBER = re.compile(r"[-+]?(0[xX][0-9a-fA-F]+|0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|\d+)U?$")
STATEMENT = re.compile(r"(?:@(!?)([%\w]+)\s+)?([a-z][\w.:]*)\s*(.*)$", re.DOTALL)


class _Parser:
    def __init__(self, text: str) -> None:
        self.lines = text.splitlines()
        entry = re.search(r"\.entry\s+([\w$]+)\s*\((.*?)\)", text, re.DOTALL)
        if entry is None:
            raise UnknownPtxError("no .entry: expected PTX with one kernel")
        declared = re.findall(r"\.param\s+\.(\w+)[^,]*?([\w$]+)\s*(?:,|$)", entry[2])
        params = [(name, CLASSES[kind]) for kind, name in declared]
        self.slots: dict[str, int] = {}
        self.dtypes: list[np.dtype] = []
        for name in SPECIAL:
            self._register(name, U32)
        declared = re.findall(r"\.global\s[^;]*?\.b8\s+(\w+)\[\d+\]\s*=\s*\{([^}]*)\}", text)
        strings = {name: bytes(map(int, x.split(","))).decode("latin1") for name, x in declared}
        self.program = Program(
            entry[1], params, self.slots, self.dtypes, blocks=[[]], labels={}, strings=strings
        )
        self.files = dict(re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]+)"', text, re.MULTILINE))
        self.scopes: list[int] = []
        self.source = ""
        self._body(text[: entry.end()].count("\n"))

    def _register(self, name: str, dtype: np.dtype) -> None:
        self.slots[name] = len(self.dtypes)
        self.dtypes.append(dtype)

    def _body(self, start: int) -> None:
        """Reads the statements from line `start` to the brace that closes the kernel."""
        pending, first = "", 0
        for number, line in enumerate(self.lines[start:], start + 1):
            line = line.split("//")[0].strip()
            if not pending and line in ("{", "}"):
                if line == "{":
                    self.scopes.append(number)
                else:
                    self.scopes.pop()
                if not self.scopes:
                    break
                continue
            if not self.scopes or not line:
                continue
            first = number if not pending else first
            pending = f"{pending} {line}".strip()
            pending = self._noted(pending)
            while ";" in pending:
                statement, _, pending = pending.partition(";")
                pending = pending.strip()
                self._statement(statement.strip(), first)
        if not self.program.blocks[-1]:
            self.program.blocks.pop()

    def _noted(self, text: str) -> str:
        """A text without the directive or the labels that it begins with, which are noted."""
        if text.startswith((".loc", ".file", ".pragma")):
            if match := re.match(r"\.loc\s+(\d+)\s+(\d+)", text):
                self.source = f"{Path(self.files.get(match[1], '?')).name}:{match[2]}"
            return ""
        while match := re.match(r"([\w$]+):\s*", text):
            if self.program.blocks[-1]:
                self.program.blocks.append([])
            self.program.labels[self._inner(match[1])] = len(self.program.blocks) - 1
            text = text[match.end() :]
        return text

    def _inner(self, name: str) -> str:
        """A new name of inline assembly is known in its braces alone."""
        return f"{name}@{self.scopes[-1]}" if len(self.scopes) > 1 else name

    def _scoped(self, name: str) -> str:
        """The register that a name means, in the innermost braces that know it."""
        for scope in reversed(self.scopes[1:]):
            if f"{name}@{scope}" in self.slots:
                return f"{name}@{scope}"
        return name

    def _statement(self, text: str, line: int) -> None:
        if match := re.match(r"\.reg\s+\.(\w+)\s+(.*)$", text):
            return self._declare(CLASSES[match[1]], match[2])
        if not text or text.startswith((".loc", ".pragma", ".param")):  # the last: of a call
            return None
        match = STATEMENT.match(text)
        if match is None:
            raise UnknownPtxError(f"PTX line {line}: {text!r} is no instruction")
        negated, guard, op, rest = match.groups()
        instruction = Instruction(
            op=op,
            args=[self._operand(part) for part in _split(rest)],
            guard=None if guard is None else self.slots[self._scoped(guard)],
            negated=negated == "!",
            line=line,
            source=self.source,
            text=text,
        )
        if instruction.mods[0] == "bra":
            label = rest.strip()
            instruction.args = [Name(label if "$" in label else self._inner(label))]
        self.program.blocks[-1].append(instruction)
        if op.startswith(ENDS):
            self.program.blocks.append([])
        return None

    def _declare(self, dtype: np.dtype, names: str) -> None:
        for name in re.split(r"\s*,\s*", names.strip()):
            if many := re.match(r"(%\w+)<(\d+)>$", name):
                for i in range(int(many[2])):
                    self._register(f"{many[1]}{i}", dtype)
            else:
                self._register(self._inner(name), dtype)

    def _operand(self, text: str) -> Operand:
        if text.startswith("{"):
            return Vector(tuple(self._item(part) for part in _split(text[1:-1])))
        if "|" in text:
            return Vector(tuple(self._item(part) for part in text.split("|")))
        if text.startswith("["):
            return self._address(text[1:-1].strip())
        if NUMBER.match(text):
            return Immediate(_number(text))
        name = self._scoped(text)
        if name in self.slots:
            return self.slots[name]
        if text.startswith("%"):
            raise UnknownPtxError(f"special register {text}")
        return Name(text)

    def _item(self, text: str) -> "int | Immediate | None":
        operand = None if text == "_" else self._operand(text.strip())
        if isinstance(operand, Vector | Address | Name):
            raise UnknownPtxError(f"{text!r} in braces")
        return operand

    def _address(self, text: str) -> Operand:
        base, _, offset = (part.strip() for part in text.partition("+"))
        if base in self.slots or base == "global_smem":
            # that is Triton's one variable in shared memory, at its start
            return Address(self.slots.get(base), _number(offset or "0"))
        return Address(None, _number(base)) if NUMBER.match(base) else Name(base)


def _split(text: str) -> list[str]:
    """Operands: parts between commas outside of braces and brackets."""
    parts = re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{\[])+", text)
    return [part.strip() for part in parts if part.strip()]


def _number(text: str) -> int:
    text = text.rstrip("U")
    sign, digits = (-1, text[1:]) if text.startswith("-") else (1, text.lstrip("+"))
    if digits[:2].lower() in ("0f", "0d"):
        return int(digits[2:], 16)
    return sign * int(digits, 0)
