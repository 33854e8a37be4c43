"""Times candidates of attention's kernels on the GPU at hand, and keeps a record of it.

A candidate is first checked against the reference, forward and gradients, on a short odd length
under every mask of the form; one that is wrong gets no time. Then all of a slot are launched in
turn, round after round, with L2 flushed before each launch: a clock that drifts or another process
meets them all alike. Only the kernel is timed, by CUDA events.
"""

import importlib.metadata
import json
import math
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.tune.predict import RECORDS
from bench.tune.search import Candidate, Settings, Slot
from fastgpt.kernels.attention.config import trying
from fastgpt.kernels.attention.launch import Options, attention_bwd, attention_fwd
from fastgpt.kernels.attention.op import attention, attention_seeded_ref, document_spans
from fastgpt.kernels.attention.spec import DROPOUT, GROUP, SHAPES, STEPS, WINDOW
from fastgpt.kernels.checks import padded
from fastgpt.kernels.runtime import Launch, recording

Timer = Callable[[list[Callable[[], object]], float], list[list[float]]]
"""(launches, seconds there are) -> milliseconds of each of them, at least two a launch."""
CHECKED_T = 515
BOUND = {16: 1e-2, 32: 1e-4}
"""Relative L2 error: bf16 alone makes 3e-3 to 5e-3 of it; a wrong tile makes far more."""
ROUNDS = 100
FLUSH_BYTES = 256 << 20


def here() -> int:
    """The arch of the current device."""
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


# --- inputs ---------------------------------------------------------------------------------------


def make(form: tuple[int, str], bits: int, device: str, T: int | None = None) -> dict[str, Any]:
    """Random q, k and v of one packed projection, and what its masks ask for."""
    D, masks = form
    B, length, H = SHAPES[padded(D)]
    T = T or length
    B = B if length == T else 2
    K = H // GROUP if "grouped" in masks else H
    dtype = torch.bfloat16 if bits == 16 else torch.float32
    qkv = torch.randn(B, T, H + 2 * K, D, device=device, dtype=dtype)
    starts = torch.rand(B, T, device=device) < 4 / length
    return {
        "qkv": qkv.split((H, K, K), dim=2),
        "causal": masks == "causal",
        "window": WINDOW if "window" in masks else None,
        "dropout_p": DROPOUT if "dropout" in masks else 0.0,
        "doc_ids": starts.int().cumsum(1, dtype=torch.int32) if "docs" in masks else None,
    }


def error(step: str, settings: Settings, form: tuple[int, str], bits: int, device: str) -> float:
    """The largest relative L2 error of the output and the three gradients."""
    made = make(form, bits, device, CHECKED_T)
    qkv = made.pop("qkv")
    seed = 5
    upstream = torch.randn_like(qkv[0])

    def run(op: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.detach().to(dtype).requires_grad_() for x in qkv]
        out = op(*leaves, **made, dropout_seed=seed)
        return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(dtype))]

    with trying(step, settings):
        got = run(attention, qkv[0].dtype)
    want = run(attention_seeded_ref, torch.float64)
    errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(got, want, strict=True)]
    return math.inf if any(map(math.isnan, errors)) else max(errors)


def launches(
    step: str, wanted: list[Settings], form: tuple[int, str], bits: int, device: str
) -> list[Callable[[], object]]:
    """A call for each of `wanted` that launches `step` alone, on what real calls would hold."""
    made = make(form, bits, device)
    q, k, v = made["qkv"]
    seed = torch.full((1,), 5, dtype=torch.int64, device=device) if made["dropout_p"] else None
    spans = document_spans(made["doc_ids"])
    options = Options(*spans, seed, None, made["causal"], made["window"], made["dropout_p"])
    out, lse = attention_fwd(q, k, v, options)
    dout = torch.randn_like(out)
    grads = tuple(torch.empty(x.shape, dtype=x.dtype, device=device) for x in (q, k, v))
    calls = []
    for settings in wanted:
        with trying(step, settings), recording(here()) as recorded:
            attention_fwd(q, k, v, options)
            attention_bwd(dout, q, k, v, out, lse, options, grads)
        for launch in recorded:  # dkv reads what dq writes
            _again(launch)
        (launch,) = [x for x in recorded if x.kernel.__name__ == STEPS[step][0]]
        calls.append(partial(_again, launch))
    return calls


def _again(launch: Launch) -> None:
    launch.kernel[launch.grid](*launch.args, **launch.meta)


# --- time -----------------------------------------------------------------------------------------


def in_turn(calls: list[Callable[[], object]], seconds: float) -> list[list[float]]:
    """A `Timer`: rounds of all calls until the seconds or ROUNDS are over, two at least."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    samples: list[list[float]] = [[] for _ in calls]
    end = time.monotonic() + seconds
    for turn in range(ROUNDS):
        marks = []
        order = range(len(calls)) if turn % 2 else reversed(range(len(calls)))
        for n in order:
            flush.zero_()
            begin, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            calls[n]()
            done.record()
            marks.append((n, begin, done))
        torch.cuda.synchronize()
        for n, begin, done in marks:
            samples[n].append(begin.elapsed_time(done))
        if turn and time.monotonic() > end:
            break
    return samples


def measure(
    arch: int,
    slot: Slot,
    found: list[Candidate],
    now: Settings,
    top: int,
    seconds: float,
    *,
    device: str = "cuda",
    timer: Timer = in_turn,
    folder: Path = RECORDS,
) -> Path | None:
    """Times the `top` best of the ranking and the shipped one; the others become infinitely slow.

    Args:
        arch: of the device.
        slot: what they are for.
        found: ranked, see `tune_search.search`; each one's `measured` is set, and what is wrong
            gets a problem instead.
        now: the shipped settings.
        top: how many to time.
        seconds: for the timing alone.
        device: to run on.
        timer: what times.
        folder: of the records.

    Returns:
        Path | None: the record that was added to; None where nothing was right.
    """
    form = next(slot.forms())
    right = [x for x in found if not x.problems]
    for x in right:
        x.measured = math.inf
    timed = [x for x in right if x in right[:top] or x.settings == now]
    for x in timed:
        off = error(slot.step, x.settings, form, slot.bits, device)
        if not off <= BOUND[slot.bits]:
            x.problems.append(f"is wrong: relative error {off:.1e}")
    timed = [x for x in timed if not x.problems]
    if not timed:
        return None
    calls = launches(slot.step, [x.settings for x in timed], form, slot.bits, device)
    rows = []
    for x, samples in zip(timed, timer(calls, seconds), strict=True):
        x.measured = statistics.median(samples)
        rows.append(_record(arch, x, form, samples))
    return write(rows, folder)


# --- records --------------------------------------------------------------------------------------


def _record(arch: int, x: Candidate, form: tuple[int, str], samples: list[float]) -> dict[str, Any]:
    row = x.rows[0]
    tile = {**x.settings, "maxnreg": x.settings.get("maxnreg")}
    B, T, H = SHAPES[x.configs[0].launch.meta["BLOCK_D"]]
    deciles = statistics.quantiles(samples, n=10, method="inclusive")
    quantiles = {"p20": deciles[1], "p50": deciles[4], "p80": deciles[7], "samples": len(samples)}
    return {
        "op": "attention", "arch": arch, "kernel": row.kernel, "case": row.config, **tile,
        "shape": [B, T, H, form[0]], "registers": row.registers, "predicted_ms": x.predicted,
        "milliseconds": quantiles, "all_milliseconds": samples,
    }  # fmt: skip


def write(rows: list[dict[str, Any]], folder: Path) -> Path:
    """Appends rows to `<folder>/<device>/<date>-tune.jsonl`, each with what produced it."""
    about = provenance()
    place = folder / re.sub(r"[^a-z0-9]+", "-", about["device"].lower()).strip("-")
    place.mkdir(parents=True, exist_ok=True)
    path = place / f"{time.strftime('%Y-%m-%d')}-tune.jsonl"
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps({**about, **row}) + "\n" for row in rows)
    return path


def provenance() -> dict[str, Any]:
    """Device, driver, versions and commit; None for what cannot be known here."""
    packages = ("torch", "triton")
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "driver": _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "versions": {"python": platform.python_version(), "cuda": torch.version.cuda}
        | {name: importlib.metadata.version(name) for name in packages},
        "commit": _said("git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"),
    }


def _said(*command: str) -> str | None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.split("\n")[0] or None
