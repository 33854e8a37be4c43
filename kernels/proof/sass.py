"""Reads the machine code of a compiled kernel, without a GPU, by the tools that come with Triton.

The ceiling of a loop takes the instructions of one pass and asks which unit is busy longest if all
of them are always busy. It leaves out latency, memory and masked lanes: it ranks configurations
and shows what limits them, it predicts no time.
"""

import math
import os
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ..runtime import family


def disassemble(cubin: bytes) -> str:
    """Returns resource usage and SASS of a cubin, by the cuobjdump that comes with Triton."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [_cuobjdump(), "--dump-resource-usage", "--dump-sass", file.name]
        # nvdisasm is looked up on PATH and comes with Triton too
        path = f"{Path(command[0]).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, env={**os.environ, "PATH": path}
        )
    return done.stdout


@cache
def _cuobjdump() -> str:
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump")


# --- loops and their ceilings ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Device:
    """Throughput of a GPU: warp instructions per cycle and multiprocessor.

    Source: CUDA C++ Programming Guide, arithmetic instructions; the matmul rate is the data sheet's
    peak for fp16, summed in fp32, over multiprocessors and clock. L2's rate is measured, by
    github.com/te42kyfo/gpu-benches (gpu-l2-cache, at 10 to 25 MB): an A100 of 108 multiprocessors
    at 1.41 GHz reads 5.4 TB/s, an H100 PCIe of 114 at 1.755 GHz 6.9, an L40 of 142 at 2.49 GHz 5.2.
    Not measured: sm_86 and 120 have sm_89's rate here, sm_100 has sm_90's.
    """

    multiprocessors: int
    ghz: float
    warps: int
    """Largest number of warps on one multiprocessor; it has 65536 registers and room for 32
    blocks."""
    shared: int
    """Bytes of shared memory on one multiprocessor."""
    fp32: float
    flops: float
    """fp16 FLOPs of one multiprocessor's tensor cores per cycle."""
    l2: float
    """Bytes that L2 delivers to one multiprocessor per cycle, if all of them read."""


DEVICES = {
    80: Device(108, 1.41, 64, 167_936, 2.0, 2048, 35.0),  # A100 SXM 80 GB
    86: Device(82, 1.70, 48, 102_400, 4.0, 512, 15.0),  # RTX 3090
    89: Device(128, 2.52, 48, 102_400, 4.0, 512, 15.0),  # RTX 4090
    90: Device(132, 1.83, 64, 233_472, 4.0, 4096, 34.0),  # H100 SXM
    100: Device(148, 1.85, 64, 233_472, 4.0, 8192, 34.0),  # B200
    120: Device(170, 2.41, 48, 102_400, 4.0, 512, 15.0),  # RTX 5090
}


def device_of(arch: int) -> Device | None:
    """Returns the figures of an arch, or of its family; None for one without figures here."""
    return DEVICES.get(family(arch))


ISSUE, ALU, MUFU, MEMORY = 4.0, 2.0, 0.5, 1.0
COLUMNS = 512
"""Columns of a multiprocessor's tensor memory on sm_100."""
DEPENDENT = 2.0
"""GPU cycles between two instructions of a warp: a result takes 4, and about 2 do not need it."""

UNITS = {
    "tensor": ("HGMMA", "QGMMA", "HMMA", "UTC"),
    "mufu": ("MUFU",),
    "fp32": ("FADD", "FMUL", "FFMA", "FSETP", "FSEL", "FMNMX", "FSET", "HFMA2", "HADD2", "HMUL2"),
    "global": ("LDG", "STG", "RED", "ATOMG", "UTMA", "UBLKCP"),
    "shared": ("LDS", "STS", "SHFL", "ATOMS", "REDUX"),
    "barrier": ("BAR", "SYNCS", "DEPBAR", "LDGDEPBAR", "WARPGROUP", "WARPSYNC", "MEMBAR", "FENCE"),
    "branch": ("BRA", "EXIT", "NOP", "BSYNC", "BSSY", "CALL", "RET", "NANOSLEEP"),
}
"""Prefixes of SASS instructions by the unit that runs them; the ALU runs all others."""


@dataclass(frozen=True, slots=True)
class Loop:
    """Instructions that one warp executes per iteration of an innermost loop of a kernel."""

    start: int
    units: dict[str, int]
    bytes: int
    """Bytes that a warp loads from and stores to global memory, with none of its lanes masked."""
    flops: int
    """FLOPs of the tensor cores; 0 where the instruction does not state its shape (sm_100)."""
    wavefronts: int = 0
    """Number of 128-byte accesses to shared memory by a warp, without bank conflicts."""
    waits: bool = False
    """True if products wait for a load whose latency nothing hides."""


@dataclass(frozen=True, slots=True)
class Ceiling:
    """Upper bound of a loop's speed, if memory and latency cost nothing."""

    bound: str
    blocks: int
    """Number of thread blocks that run on one multiprocessor at the same time."""
    clocks: float
    """Estimated GPU cycles for the warps of one thread block to run one iteration of the loop."""
    alone: float
    """Estimated GPU cycles of an iteration if no other block runs on the multiprocessor.

    Products and the rest then alternate, and a warp issues at most every DEPENDENT clocks.
    """
    tflops: float
    gbytes: float


_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Zx0-9_.]*)([^;]*);")


def instructions(sass: str) -> list[tuple[int, str, str]]:
    """Yields (address, operation, operands) of each instruction, except the NOPs of the padding."""
    return [
        (int(address, 16), op, operands)
        for address, op, operands in _INSTRUCTION.findall(sass)
        if op != "NOP"
    ]


def loops(sass: str) -> list[Loop]:
    """Returns the innermost loops by address, or the whole kernel if it has none.

    Loops of fewer than 16 instructions only wait, and are left out.
    """
    code = instructions(sass)
    spans = []
    for address, op, operands in code:
        target = re.search(r"0x([0-9a-f]+)", operands) if op.startswith("BRA") else None
        if target and int(target[1], 16) < address:
            spans.append((int(target[1], 16), address))
    inner = [s for s in spans if not any(s != t and s[0] <= t[0] and t[1] <= s[1] for t in spans)]
    found = []
    for start, end in sorted(inner) or [(0, code[-1][0])]:
        inside = [(op, operands) for address, op, operands in code if start <= address <= end]
        body = [op for op, _ in inside]
        if len(body) >= 16:
            units = dict(Counter(map(unit_of, body)))
            sums = (sum(map(count, body)) for count in (_bytes, _flops, _wavefronts))
            found.append(Loop(start, units, *sums, waits=bool(inner) and _waits(inside)))
    return found


def _waits(body: list[tuple[str, str]]) -> bool:
    """Returns True if a pass waits for a load without a product since it was asked for.

    LDGDEPBAR closes a group of asynchronous copies; DEPBAR waits until only its number of youngest
    groups is under way. A copy may serve a later pass, so three passes are followed.
    """
    ops = [op for op, _ in body]
    if not any(unit_of(op) == "tensor" for op in ops):
        return False
    if not any(op.startswith("LDGDEPBAR") for op in ops):
        return any(_bytes(op) and op.startswith("LDG") for op in ops)
    late, computed = False, []  # for each group under way: whether there was a product since
    for op, operands in 3 * body:
        if op.startswith("LDGDEPBAR"):
            computed.append(False)
        elif unit_of(op) == "tensor":
            computed = [True] * len(computed)
        elif op.startswith("DEPBAR") and (most := re.search(r"SB0, 0x([0-9a-f]+)", operands)):
            ended = max(0, len(computed) - int(most[1], 16))
            late |= not all(computed[:ended])
            computed = computed[ended:]
    return late


def unit_of(op: str) -> str:
    """Returns the unit that runs an operation: a key of `UNITS`, "alu" or "uniform"."""
    other = "uniform" if op.startswith("U") else "alu"
    return next((unit for unit, prefixes in UNITS.items() if op.startswith(prefixes)), other)


def _bytes(op: str) -> int:
    if not op.startswith(("LDG", "STG")) or op.startswith("LDGDEPBAR"):
        return 0
    bits = re.search(r"\.(128|64|U?S?16|U?S?8)(?:\.|$)", op)
    return 32 * (int(re.sub(r"\D", "", bits[1])) // 8 if bits else 4)


def _flops(op: str) -> int:
    shape = re.match(r"HGMMA\.(\d+)x(\d+)x(\d+)", op)
    if shape:  # issued by four warps together
        return 2 * math.prod(map(int, shape.groups())) // 4
    shape = re.match(r"HMMA\.(16)(8)(8|16)\b", op)
    return 2 * math.prod(map(int, shape.groups())) if shape else 0


def _wavefronts(op: str) -> int:
    if unit_of(op) != "shared" and not op.startswith("LDGSTS"):
        return 0
    width = re.search(r"88\.([124])|\.(64|128)\b", op)  # 8 x 8 matrices of 128 bytes, or bits
    return int(width[1] or int(width[2]) // 32) if width else 1


def ceiling(
    loop: Loop, arch: int, warps: int, registers: int, shared: int, columns: int = 0
) -> Ceiling | None:
    """Computes the upper bound of a loop's speed; None for an architecture without figures here."""
    device = device_of(arch)
    if device is None:
        return None
    per_warp = 8 * -(-registers // 8) * 32
    fits = (65_536 // (per_warp * warps), device.warps // warps, 32)
    blocks = min(*fits, device.shared // (shared + 1024))
    if columns:
        blocks = min(blocks, COLUMNS // columns)
    counts = Counter(loop.units)
    clocks = {
        "issue": sum(counts.values()) / ISSUE,
        "fp32": counts["fp32"] / device.fp32,
        "alu": counts["alu"] / ALU,
        "mufu": counts["mufu"] / MUFU,
        "memory": (counts["shared"] + counts["global"]) / MEMORY,
        "shared": loop.wavefronts / MEMORY,
        "tensor": loop.flops / device.flops,
    }
    bound, most = max(clocks.items(), key=lambda item: item[1])
    per_second = device.multiprocessors * device.ghz / most
    return Ceiling(
        bound=bound,
        blocks=blocks,
        clocks=most * warps,
        alone=clocks.pop("tensor") * warps
        + max(max(clocks.values()) * warps, DEPENDENT * sum(counts.values())),
        tflops=loop.flops * per_second / 1e3,
        gbytes=loop.bytes * per_second,
    )
