"""Times candidates of attention's kernels on this machine's GPU and records the samples.

A candidate is first checked with the rule of `kernels.parity`, forward and gradients, on a short
odd length under every mask of the form; one with wrong results gets no time. Then the kernel alone
is timed, all candidates of a slot in turn, by the benchmark's own timer.
"""

import math
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import records
from bench.timing import Timed, Timer, quantiles
from bench.tune.search import Candidate, Slot, TileConfig
from fastgpt.kernels import parity
from fastgpt.kernels.attention.backward import attention_bwd
from fastgpt.kernels.attention.config import trying
from fastgpt.kernels.attention.forward import attention_fwd
from fastgpt.kernels.attention.op import attention, document_spans
from fastgpt.kernels.attention.plain import AttentionOptions
from fastgpt.kernels.attention.spec import ATTENTION, DROPOUT, GROUP, SHAPES, STEPS, WINDOW
from fastgpt.kernels.checks import padded
from fastgpt.kernels.runtime import Launch, recording

CHECKED_T = 515


def here() -> int:
    """Returns the current GPU's architecture as a number, 90 for sm_90."""
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


# --- inputs ---------------------------------------------------------------------------------------


def make(form: tuple[int, str], bits: int, device: str, T: int | None = None) -> dict[str, Any]:
    """Makes random q, k and v of one packed projection, and the arguments of its masks."""
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


def complaints(
    step: str, settings: TileConfig, form: tuple[int, str], bits: int, device: str
) -> list[str]:
    """Checks the output and the three gradients; returns a line for each error."""
    made = {**make(form, bits, device, CHECKED_T), "dropout_seed": 5}
    inputs = dict(zip("qkv", made.pop("qkv"), strict=True))

    def draw(_: int, y: Tensor) -> Tensor:
        generator = torch.Generator(device).manual_seed(1)
        return torch.randn(y.shape, generator=generator, device=device)

    results = partial(parity.outputs_and_gradients, inputs=inputs, draw=draw, **made)
    dtype = inputs["q"].dtype
    with trying(step, settings):
        got = results(attention, dtype=dtype)
    eager = results(ATTENTION.eager, dtype=dtype)
    truth = results(ATTENTION.ref, dtype=torch.float64)
    return parity.complaints(got, eager, truth, dtype)


def launches(
    step: str, configs: list[TileConfig], form: tuple[int, str], bits: int, device: str
) -> list[Callable[[], object]]:
    """Makes one call per configuration, which launches only the kernel of `step`."""
    made = make(form, bits, device)
    q, k, v = made["qkv"]
    seed = torch.full((1,), 5, dtype=torch.int64, device=device) if made["dropout_p"] else None
    spans = document_spans(made["doc_ids"])
    options = AttentionOptions(
        *spans, seed, None, made["causal"], made["window"], made["dropout_p"]
    )
    out, lse = attention_fwd(q, k, v, options)
    dout = torch.randn_like(out)
    grads = tuple(torch.empty(x.shape, dtype=x.dtype, device=device) for x in (q, k, v))
    calls = []
    for settings in configs:
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


def time_candidates(
    arch: int,
    slot: Slot,
    found: list[Candidate],
    now: TileConfig,
    top: int,
    seconds: float,
    *,
    timer: Timer,
    folder: Path | None = None,
) -> Path | None:
    """Times the `top` best of the ranking and the shipped candidate; the others get infinite time.

    Args:
        found: ranked candidates, see `bench.tune.search.search`; sets `measured` of each, or adds
            a problem to one with wrong results.
        now: the shipped settings.
        top: number of candidates to time.
        seconds: time for the timing alone.
        folder: folder of the record; by default that of the device.

    Returns:
        Path | None: the record that was added to; None where nothing was right.
    """
    form = next(slot.forms())
    right = [x for x in found if not x.problems]
    for x in right:
        x.measured = math.inf
    timed = [x for x in right if x in right[:top] or x.settings == now]
    for x in timed:
        wrong = complaints(slot.step, x.settings, form, slot.bits, timer.on)
        x.problems += [f"is wrong: {line}" for line in wrong[:1]]
    timed = [x for x in timed if not x.problems]
    if not timed:
        return None
    calls = launches(slot.step, [x.settings for x in timed], form, slot.bits, timer.on)
    rivals = {str(n): Timed(lambda _, call=call: call()) for n, call in enumerate(calls)}
    rows = []
    for x, samples in zip(timed, timer.interleave(rivals, seconds=seconds).values(), strict=True):
        milliseconds = [1e3 * seconds for seconds in samples.device]
        x.measured = statistics.median(milliseconds)
        rows.append(_row(arch, x, form, milliseconds))
    return records.Writer(timer.on, folder, "tune", **timer.settings).write("tune", *rows)


def _row(arch: int, x: Candidate, form: tuple[int, str], samples: list[float]) -> dict[str, Any]:
    row = x.rows[0]
    tile = {**x.settings, "maxnreg": x.settings.get("maxnreg")}
    B, T, H = SHAPES[x.configs[0].launch.meta["BLOCK_D"]]
    return {
        "op": "attention", "arch": arch, "kernel": row.kernel, "case": row.config, **tile,
        "shape": [B, T, H, form[0]], "registers": row.registers, "predicted_ms": x.predicted,
        "milliseconds": quantiles(samples), "all_milliseconds": samples,
    }  # fmt: skip
