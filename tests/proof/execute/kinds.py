"""Kinds of changes of compiled code, as bugs in a compiler would make them; `mutants` runs them."""

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

Change = Callable[[re.Match[str], random.Random], str]
"""Function that makes the new text of an instruction."""
OPPOSITES = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt", "eq": "ne", "ne": "eq"}


def deleted(m: re.Match[str], rng: random.Random) -> str:
    return ""


def one_more(m: re.Match[str], rng: random.Random) -> str:
    return f"{m[1]}{int(m[2]) + 1};"


def two_swapped(m: re.Match[str], rng: random.Random) -> str:
    """Swaps two registers that differ in one of the instruction's vectors."""
    vectors = [v for v in re.finditer(r"\{[^{}]*\}", m[0]) if len(set(names(v[0]))) > 1]
    if not vectors:
        return m[0]
    vector = rng.choice(vectors)
    registers = names(vector[0])
    i, j = rng.choice([(i, j) for i, a in enumerate(registers) for j in range(i)
                       if a != registers[j]])  # fmt: skip
    registers[i], registers[j] = registers[j], registers[i]
    return f"{m[0][: vector.start()]}{{{', '.join(registers)}}}{m[0][vector.end() :]}"


def names(vector: str) -> list[str]:
    return [name.strip() for name in vector[1:-1].split(",")]


def another_bit(m: re.Match[str], rng: random.Random) -> str:
    """Flips one of the lowest bits that an address or a layout is made of."""
    return f"{m[1]}{int(m[2]) ^ rng.choice((16, 32, 64))};"


def field_changed(m: re.Match[str], rng: random.Random) -> str:
    """Flips a bit in a field of a descriptor: start, strides, swizzle; sizes, formats, majors."""
    bits = (1, 16, 32, 33, 62, 63) if "64" in m[1] else (15, 16, 17, 24)
    flipped = int(m[2]) ^ (1 << rng.choice(bits))
    return f"{m[1]}{flipped - (flipped >> 63 << 64) if flipped > 0 else flipped};"


KINDS: dict[str, tuple[str, Change]] = {
    "barrier deleted": (r"bar\.sync\s+0;", deleted),
    "cp.async waited for one group late": (r"(cp\.async\.wait_group\s+)(\d+);", one_more),
    "wgmma waited for one group late": (r"(wgmma\.wait_group\.sync\.aligned\s+)(\d+);", one_more),
    "tcgen05.wait deleted": (r"tcgen05\.wait::\w+\.sync\.aligned;", deleted),
    "commit deleted": (r"(?:@!?%p\d+ )?(?:cp\.async|wgmma|tcgen05)\.commit[^;]*;", deleted),
    "mbarrier's parity flipped": (
        r"(mbarrier\.try_wait[^;]*, )([%\w]+);",
        lambda m, rng: f".reg .b32 flipped;\nxor.b32 flipped, {m[2]}, 1;\n{m[1]}flipped;",
    ),
    "proxy fence deleted": (r"fence\.proxy\.async[\w.:]*\s*;", deleted),
    "predicate dropped": (r"@!?%p\d+ (?=(?:ld|st)\.global)", deleted),
    "predicate negated": (r"@(!?)(?=%p\d+)", lambda m, rng: "@" if m[1] else "@!"),
    "comparison changed": (r"(?<=setp\.)(lt|le|gt|ge|eq|ne)(?=\.)", lambda m, rng: OPPOSITES[m[1]]),
    "ldmatrix transposed": (
        r"(ldmatrix\.sync\.aligned\.m8n8\.x\d)(\.trans)?",
        lambda m, rng: m[1] + ("" if m[2] else ".trans"),
    ),
    "registers swapped": (
        r"(?:ldmatrix|stmatrix|mma\.sync|wgmma\.mma|tcgen05\.ld|tcgen05\.st)[^;]*;", two_swapped,
    ),
    "shuffle's distance changed": (
        r"(shfl\.sync\.\w+\.b32\s+[^,]+,[^,]+, )(\d+)",
        lambda m, rng: m[1] + str(int(m[2]) // 2 or 2 - int(m[2]) % 2),
    ),
    "shared address off by 16": (
        r"((?:ld\.shared|st\.shared|ldmatrix|stmatrix|cp\.async\.c[ag])[^\[;]*\[\s*%r\d+)"
        r"(?:\s*\+\s*(\d+))?(?=\s*\])",
        lambda m, rng: f"{m[1]}+{int(m[2] or 0) + 16}",
    ),
    "swizzle changed": (r"(xor\.b32\s+%r\d+, %r\d+, )(\d+);", another_bit),
    "descriptor changed": (
        r"((?:(?:or|add)\.[bs]64\s+%rd\d+, %rd\d+|mov\.b32\s+%r\d+), )"
        r"(-?46116\d+|13[45]\d{6}|13[67]\d{6});", field_changed,
    ),
    "conversion's operands swapped": (
        r"(cvt\.rn\.\w+x2\.f32\s+%r\d+), (%r\d+), (%r\d+);",
        lambda m, rng: f"{m[1]}, {m[3]}, {m[2]};",
    ),
    "store deleted": (
        r"(?:@!?%p\d+ )?(?:st\.global|st\.shared|stmatrix|tcgen05\.st)[^;]*;", deleted,
    ),
    "mov 0 deleted": (r"mov\.b32\s+%r\d+, 0(?:f0+)?;", deleted),
}  # fmt: skip
"""Kind -> (pattern of the text that is changed, function that changes it)."""


@dataclass(frozen=True, slots=True)
class Site:
    """A place in a kernel's PTX, and what is written there instead."""

    kind: str
    start: int
    end: int
    new: str

    def apply(self, ptx: str) -> str:
        return ptx[: self.start] + self.new + ptx[self.end :]


def sites(ptx: str, kind: str, rng: random.Random) -> Iterator[Site]:
    """Yields the changes of one kind that a kernel's text has."""
    pattern, change = KINDS[kind]
    for m in re.compile(pattern).finditer(ptx, ptx.index(".entry")):
        new = change(m, rng)
        if new != m[0]:
            yield Site(kind, m.start(), m.end(), new)
