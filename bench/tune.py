"""Chooses the block sizes of attention's kernels: `python -m bench.tune`.

Candidates for a row of a table in kernels/attention/tuning/ are compiled and ranked by predicted
time. Without --static, the best and the shipped row are then checked and timed on this machine.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench import report
from bench.measure import Timed, Timer, quantiles
from bench.records import Record, Writer, record
from fastgpt import flags
from fastgpt.errors import UserError, run_command
from fastgpt.kernels import runtime
from fastgpt.kernels.attention import spec
from fastgpt.kernels.attention.config import KEYS, TUNING, rows, trying
from fastgpt.kernels.attention.plain import attention_mask
from fastgpt.kernels.proof.compile import CompileResult, collect, compile_all
from fastgpt.kernels.proof.rules import SHARED_LIMIT, TUNED, wrong
from fastgpt.kernels.proof.sass import DEVICES

DTYPES = {16: torch.bfloat16, 32: torch.float32}
CHECKED = {"B": 2, "T": 515}  # short, and no multiple of a block
MARGIN = 0.05  # the shipped row stays if its time is within this of the best


@dataclass(frozen=True, kw_only=True, slots=True)
class Tune:
    """Chooses the block sizes of attention's kernels."""

    static: bool = False
    """Choose by predicted times, without a GPU."""
    arch: tuple[int, ...] = ()
    """Architectures such as 90, with --static; by default those with tables of their own."""
    only: tuple[str, ...] = ()
    """Texts such as 'sm_90 dq 16 bits D=64': tune only slots whose name has one of them."""
    write: bool = False
    """Write the choice into the architecture's own table."""
    top: int = 6
    """Number of candidates that are compared with the shipped row."""
    budget: float = 600
    """Seconds of timing in all."""
    out: Path | None = None
    """Folder of the record; by default bench/results/local."""


class Slot(NamedTuple):
    """A row of an architecture's table: the calls that it serves, and their settings."""

    arch: int
    row: dict[str, Any]

    @property
    def heads(self) -> list[int]:
        return self.row["D"] if isinstance(self.row["D"], list) else [self.row["D"]]

    @property
    def name(self) -> str:
        which = {True: " plain", False: " masked", None: ""}[self.row.get("plain")]
        D = ",".join(map(str, self.heads))
        return f"sm_{self.arch} {self.row['step']} {self.row['bits']} bits D={D}{which}"

    def forms(self) -> Iterator[tuple[int, str]]:
        """Yields (head dimension, masks) of each kernel variant; the first one is timed."""
        plain, masked = self.row.get("plain"), spec.MASKS[2]
        for D in reversed(self.heads):
            yield from ((D, masks) for masks in spec.MASKS if plain in (None, masks != masked))
        if not plain and 128 in self.heads:
            yield 80, spec.MASKS[0]

    def problem(self) -> dict[str, Any]:
        """Returns the problem of attention's `Spec` that is timed."""
        D, masks = next(self.forms())
        B, T, H = spec.SHAPES[D]
        hidden = {"docs": T // 2, "window": spec.WINDOW, "dropout_p": spec.DROPOUT}
        more = hidden | {"K": H // spec.GROUP} if masks == spec.MASKS[2] else {}
        return spec.problem(B, T, H, D, causal=masks == "causal", **more)

    def write(self, settings: dict[str, int]) -> None:
        """Writes settings into the architecture's own table, which is first copied if missing."""
        keys = {name: value for name, value in self.row.items() if name in KEYS}
        table = [keys | settings if row == self.row else row for row in rows(self.arch)]
        lines = ",\n".join(f"  {json.dumps(row)}" for row in table)
        path = TUNING / f"sm_{self.arch}.json"
        path.write_text(f'{{\n "attention": [\n{lines}\n ]\n}}\n', encoding="utf-8")
        rows.cache_clear()


def selected(archs: Iterable[int], only: Iterable[str]) -> list[Slot]:
    """Returns the slots whose names have one of the texts, or all; `UserError` if there is none."""
    slots = [Slot(arch, row) for arch in archs for row in rows(arch)]
    if found := [slot for slot in slots if any(text in slot.name for text in only or [""])]:
        return found
    raise UserError(f"--only is {' '.join(only)}: expected part of a name, {slots[0].name!r}")


@dataclass(slots=True)
class Candidate:
    """Settings to try, what the compiler made of each kernel variant, and milliseconds."""

    settings: dict[str, Any]
    results: list[CompileResult] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    predicted: float = 0.0
    measured: float | None = None

    @property
    def name(self) -> str:
        M, N, warps, stages, *bound = self.settings.values()
        return f"{M}x{N} w{warps} s{stages}" + "".join(f" r{registers}" for registers in bound)

    @property
    def time(self) -> float:
        """The milliseconds that count in the choice, infinite for a candidate with a problem."""
        return float("inf") if self.problems else self.measured or self.predicted


def settings_to_try(row: dict[str, Any], D: int) -> Iterator[dict[str, int]]:
    """Yields a row's settings, then all others whose accumulators fit into registers."""
    shipped = {name: value for name, value in row.items() if name not in KEYS}
    yield shipped
    sides = (32, 64, 128) if row["bits"] == 16 else (16, 32, 64)
    stages = (2, 3, 4) if row["bits"] == 16 and D < 256 else (1, 2, 3)
    for M, N, warps, each in product(sides, sides, (4, 8), stages):
        held = {"fwd": M * D + M * N, "dq": M * D + 2 * M * N, "dkv": 2 * N * D + 2 * M * N}
        tried = {"BLOCK_M": M, "BLOCK_N": N, "num_warps": warps, "num_stages": each}
        # a thread has 255 registers; a tile that needs more than 224 for these certainly spills
        if held[row["step"]] <= 224 * 32 * warps and tried != shipped:
            yield tried


def search(slot: Slot, top: int) -> list[Candidate]:
    """Returns the shipped candidate and the `top` others with the shortest predicted times."""
    found = [Candidate(x) for x in settings_to_try(slot.row, max(slot.heads))]
    first, *more = slot.forms()
    compile_forms(slot, found, [first])
    for x in found:
        x.predicted = 0.0 if x.problems else predict(slot, x.settings, x.results[0])
    found[1:] = sorted(found[1:], key=lambda x: x.time)[:top]
    compile_forms(slot, [x for x in found if not x.problems], more)  # not of all: it takes long
    return found


def compile_forms(slot: Slot, found: list[Candidate], forms: list[tuple[int, str]]) -> None:
    """Compiles kernel variants of each candidate and notes what is wrong with them."""
    step, dtype, pairs = slot.row["step"], DTYPES[slot.row["bits"]], []
    variants = [lambda arch: (spec.variant(arch, D, dtype, masks) for D, masks in forms)]
    for x in found:
        with trying(step, x.settings):
            configs = [*collect(variants, [slot.arch])]
        pairs += [(x, config) for config in configs if config.kernel == spec.STEPS[step][0]]
    for (x, _), result in zip(pairs, compile_all(config for _, config in pairs), strict=True):
        x.results.append(result)
        x.problems += wrong(result)


@cache
def tiles(T: int, M: int, N: int, causal: bool, window: int | None) -> tuple[int, int]:
    """Counts the tiles of a head's (T, T) scores that need no mask and those that need one."""
    mask: Any = attention_mask(T, T, causal=causal, window=window)
    seen = torch.nn.functional.avg_pool2d(mask[0].float(), (M, N))
    return int((seen == 1).sum()), int(((seen > 0) & (seen < 1)).sum())


def predict(slot: Slot, settings: dict[str, int], code: CompileResult) -> float:
    """Predicts the milliseconds of the slot's problem, a lower bound, from compiled code.

    A tile takes the most of: the clocks of the busiest unit, products and the rest in turn, its
    bytes from L2; and the latency of a load that products wait for. Only the loops count.
    """
    device, problem, bits = DEVICES[runtime.family(slot.arch)], slot.problem(), slot.row["bits"]
    M, N, D = settings["BLOCK_M"], settings["BLOCK_N"], problem["D"]
    flops = spec.PRODUCTS[code.kernel] * 2 * M * N * D // code.warps if bits == 16 else 0
    from_l2 = 2 * (M if slot.row["step"] == "dkv" else N) * D * bits / 8 / device.l2
    clocks = []
    # the two loops with most instructions: the masked one has more than the other
    for loop in sorted(code.loops, key=lambda x: sum(x.units.values()))[-2:]:
        loop = replace(loop, flops=max(flops, loop.flops))  # not all instructions state theirs
        limit: Any = code.ceiling(loop)
        blocks = max(1, limit.blocks)
        # 700: clocks of a load from L2 while all multiprocessors read; 500 to 900 are likely
        clocks.append(max(limit.clocks, limit.alone / blocks, from_l2) + 700 * loop.waits / blocks)
    whole, masked = tiles(problem["T"], M, N, problem["causal"], problem.get("window"))
    total = problem["B"] * problem["H"] * (whole * clocks[0] + masked * clocks[-1])
    return total / device.multiprocessors / device.ghz / 1e6


def timed(slot: Slot, settings: dict[str, int], on: str) -> Timed:
    """Returns the call of the slot's kernel alone; its inputs are computed here."""
    op, problem = spec.ATTENTION_PACKED, slot.problem()
    inputs = op.inputs(problem, lambda *sizes, below=0: torch.randn(sizes, device=on))
    qkv = inputs["qkv"].to(DTYPES[slot.row["bits"]]).requires_grad_()
    with trying(slot.row["step"], settings), runtime.recording(slot.arch) as launches:
        out = op.call(op.op, problem, on)(qkv)
        torch.autograd.grad(out, qkv, torch.randn_like(out))
    calls = [partial(runtime.launch, x.kernel, x.grid, *x.args, **x.meta) for x in launches]
    for call in calls:
        call()
    return Timed(lambda _: calls[[*spec.STEPS].index(slot.row["step"])]())


def measure(slot: Slot, found: list[Candidate], timer: Timer, seconds: float) -> Iterator[Record]:
    """Times the candidates with right results in turn; yields a record of each."""
    case, shape = f"tune/{slot.name.replace(' ', '/', 1)}", slot.problem()
    op = replace(spec.ATTENTION_PACKED, problems={"checked": shape | CHECKED}, cpu=None)
    for x in found:
        with trying(slot.row["step"], x.settings):
            wrong = [] if x.problems else op.faults(timer.on, DTYPES[slot.row["bits"]])
        x.problems += [f"wrong: {line}" for line in wrong[:1]]
    right = {x.name: x for x in found if not x.problems}
    rivals = {name: timed(slot, x.settings, timer.on) for name, x in right.items()}
    for name, samples in timer.interleave(rivals, seconds=seconds).items():
        x, figure = right[name], quantiles(samples)
        x.measured = 1e3 * figure["p50"]
        yield record(case, name, figure, predicted_ms=x.predicted, shape=shape, **x.settings)


def choose(found: list[Candidate]) -> Candidate:
    """Returns the shipped candidate, the first, if it is within MARGIN of the best, or the best."""
    best = min(found, key=lambda x: x.time)
    return found[0] if found[0].time <= (1 + MARGIN) * best.time else best


def archs_of(asked: Tune) -> list[int]:
    """Returns the architectures to tune for; `UserError` if the flags do not fit each other."""
    if runtime.INTERPRETING:
        raise UserError("unset TRITON_INTERPRET, because the interpreter compiles nothing")
    if not asked.static and (asked.arch or not torch.cuda.is_available()):
        raise UserError("torch sees no CUDA device, or --arch is given: expected --static as well")
    archs = [*(asked.arch or TUNED)] if asked.static else [runtime.arch(torch.device("cuda"))]
    if unknown := [arch for arch in archs if runtime.family(arch) not in SHARED_LIMIT]:
        raise UserError(f"sm_{unknown[0]} is unknown: expected one of {[*SHARED_LIMIT]}")
    return archs


def main(argv: list[str]) -> int:
    asked, stuck = flags.command(Tune, argv, prog="python -m bench.tune"), False
    slots = selected(archs_of(asked), asked.only)
    for slot in slots:
        print(f"{slot.name} ...", flush=True)
        found = search(slot, asked.top)
        if not asked.static:
            timings = measure(slot, found, Timer("cuda"), asked.budget / len(slots))
            Writer("cuda", asked.out).write(*timings)
        by_time = sorted(found, key=lambda x: x.time)
        lines = [(x.name, f"{x.predicted:.4f}", f"{x.time:.4f}", *x.problems[:1]) for x in by_time]
        report.show("candidate|predicted ms|ms|problem", lines)
        chosen = choose(found)
        print(f"shipped: {found[0].name}; chosen: {chosen.name}", *chosen.problems[:1], flush=True)
        stuck |= bool(chosen.problems)
        if asked.write and not chosen.problems:
            slot.write(chosen.settings)
    return int(stuck)


if __name__ == "__main__":
    run_command(main)
