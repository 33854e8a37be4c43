"""Choice of kernels for `auto` on CUDA: ours if a trial on this GPU finds them correct and faster.

Before training, each op of ours is checked by the rule of `kernels.parity` and timed beside
PyTorch's, forward and backward, at the run's own sizes. The result is cached by GPU, versions,
kernel sources and sizes.

The trial runs in a child process (`python -m fastgpt.autotune.choose OP`), so that a kernel that
crashes or hangs does not end the run. A failed trial is reported, and PyTorch's op is used instead.
"""

import hashlib
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastgpt.autotune.trials import TRIALS, Sizes, make_trial
from fastgpt.config.config import OpsConfig
from fastgpt.config.model import ModelConfig
from fastgpt.device import device
from fastgpt.errors import UserError, brief
from fastgpt.files import code_hash, recall, remember
from fastgpt.kernels import parity, runtime

PACKAGE = Path(__file__).parents[1]
KERNELS = Path(runtime.__file__).parent
TIMEOUT = 600.0
"""Time limit in seconds for the trials of all ops."""
CHECKED = 1024
"""Largest number of tokens in a correctness check: the reference stores all attention scores."""
WORTH = {"loss": 1.05}
"""Largest time of ours, relative to PyTorch's, at which ours is chosen, where it is not 1: our loss
halves a step's memory, which is worth more than a twentieth of its time."""
CHILD = ["-m", "fastgpt.autotune.choose"]

TrialResult = dict[str, Any]
"""Result of a trial: `chosen`, an implementation; `complaints`, the errors found in ours; and
`milliseconds` of each implementation."""


# --- the child ------------------------------------------------------------------------------------


def run_trial(name: str, sizes: Sizes, on: str) -> TrialResult:
    """Checks and times the implementations, and chooses the fastest; ours only if it is correct."""
    wrong, times = faults(name, sizes, on), {}
    trial = make_trial(name, sizes, on, sizes.batch, sizes.model.context)
    for key, op in trial.ops.items() if not wrong else ():
        with suppress(torch.OutOfMemoryError):  # then it has no time, and is not chosen
            times[key] = 1e3 * seconds(op, trial.inputs, sizes, on)
    ours, plain = trial.ops
    cost = {key: ms / WORTH.get(name, 1) if key == ours else ms for key, ms in times.items()}
    chosen = min(cost, key=lambda key: cost[key], default=plain)
    return {"chosen": chosen, "complaints": wrong, "milliseconds": times}


def faults(name: str, sizes: Sizes, on: str) -> list[str]:
    """Checks our implementation in fp32 and in the run's precision; returns the errors found."""
    found = []
    for dtype in {torch.float32, device.DTYPES[sizes.precision]}:
        torch.manual_seed(0)
        trial = make_trial(name, sizes, on, 1, min(sizes.model.context, CHECKED))
        found += parity.faults([*trial.ops.values(), trial.ref], trial.inputs, dtype)
    return found


def seconds(op: parity.Op, inputs: dict[str, Tensor], sizes: Sizes, on: str) -> float:
    """Times an implementation forward and backward as the run would call it."""
    leaves = [x.requires_grad_() for x in inputs.values() if x.is_floating_point()]
    if sizes.compiled:
        op = torch.compile(op, options=device.compile_options(on, "on"))

    def step() -> None:
        with device.autocast(on, sizes.precision):
            out = op(*inputs.values())
        outs = [out] if isinstance(out, Tensor) else list(out)
        # randn_like would be timed, too
        torch.autograd.grad(outs, leaves, [y if y.dim() else torch.ones_like(y) for y in outs])

    return timer(step)


def timer(step: Callable[[], object]) -> float:
    from triton.testing import do_bench  # flushes L2 between calls

    return do_bench(step, warmup=50, rep=200, return_mode="median") / 1e3  # pyright: ignore


def main() -> None:
    """Tries what the arguments name; prints a result a line, and an error as the last one."""
    on, given = json.load(sys.stdin)
    given["model"] = ModelConfig(**given["model"])
    sizes = Sizes(**given)
    try:
        for name in sys.argv[1:]:
            print(json.dumps({name: run_trial(name, sizes, on)}), flush=True)
    except Exception as error:  # after which CUDA may print more, or abort
        print(brief(error), file=sys.stderr, flush=True)
        os._exit(1)


# --- the parent -----------------------------------------------------------------------------------


def require_toolchain(config: OpsConfig, on: str) -> None:
    """Raises `UserError` if Triton cannot build kernels that `config` asks for by name on CUDA."""
    asked = [op for op, name in asdict(config).items() if name in ("triton", "chunked")]
    if asked and device.kind_of(on).kernels and (missing := device.missing_for_triton()):
        raise UserError(f"--ops.{asked[0]} is {getattr(config, asked[0])}: {missing}")


def choose(
    config: OpsConfig, sizes: Sizes, on: str, warn: Callable[[str], None]
) -> tuple[OpsConfig, dict[str, TrialResult]]:
    """Replaces each `auto` in `config` that a trial on this GPU decides; also returns the results.

    There are trials on CUDA only; each reason not to use ours is a warning of one line.
    """
    asked = [name for name in TRIALS if getattr(config, name) == "auto"]
    if sizes.model.position != "rotary":
        asked = [name for name in asked if name != "rotary"]
    if not device.kind_of(on).kernels or not asked:
        return config, {}
    if missing := device.missing_for_triton():
        warn(f"{missing}; PyTorch's ops are used instead of our kernels")
        return config, {}
    results = remembered_or_tried(asked, sizes, on, warn)
    for name, result in results.items():
        if result["complaints"]:
            warn(
                f"--ops.{name}: our kernels did not pass their trial on this device "
                f"({result['complaints'][0]}); using {result['chosen']} instead"
            )
    return replace(config, **{name: it["chosen"] for name, it in results.items()}), results


def plain_name(op: str) -> str:
    """Returns PyTorch's implementation of an op, which is used if its trial fails."""
    return "sdpa" if op == "attention" else "torch"


def why(result: TrialResult) -> str:
    """Returns the reason of a result: the error found, or the times."""
    times = (f"{name} {ms:.3g} ms" for name, ms in result["milliseconds"].items())
    return (result["complaints"] or [", ".join(times) or "out of memory"])[0]


def remembered_or_tried(
    asked: list[str], sizes: Sizes, on: str, warn: Callable[[str], None]
) -> dict[str, TrialResult]:
    """Returns the result of each trial asked for, from the cache where it is known there.

    A child that ends early failed at the first op without a result; another one tries the rest.
    """
    known: dict[str, dict[str, TrialResult]] = recall("ops.json")
    results, failed = known.setdefault(_key(sizes, on), {}), {}
    left, end = [name for name in asked if name not in results], time.monotonic() + TIMEOUT
    if left:
        warn("checking and timing our kernels on this device, once; this takes a minute or two")
    while left:
        found, reason = _child(left, sizes, on, max(0.0, end - time.monotonic()))
        results |= found
        remember("ops.json", known)
        left = [name for name in left if name not in found]
        if left:  # the next run tries it again
            op = left.pop(0)
            failed[op] = {"chosen": plain_name(op), "complaints": [reason], "milliseconds": {}}
    return {name: (results | failed)[name] for name in asked}


def _key(sizes: Sizes, on: str) -> str:
    """Cache key of a result: a hash of the device, versions, sizes, kernels and their tables."""
    code = code_hash(KERNELS, PACKAGE / "autotune", PACKAGE / "ops")
    # not by its package, which has other names in some builds of torch
    versions = [importlib.import_module(name).__version__ for name in ("torch", "triton")]
    facts = [device.device_name(on), *versions, code, asdict(sizes)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _child(
    names: list[str], sizes: Sizes, on: str, seconds: float
) -> tuple[dict[str, TrialResult], str]:
    """Runs trials in a child process; returns its results and how it ended."""
    order, results = json.dumps([on, asdict(sizes)]), {}
    try:
        done = subprocess.run(
            [sys.executable, *CHILD, *names],
            input=order, capture_output=True, text=True, timeout=seconds, cwd=PACKAGE.parent,
        )  # fmt: skip
        said, errors = done.stdout, done.stderr.strip()
        reason = f"the trial ended with code {done.returncode}"
        reason += f": {errors.splitlines()[-1]}" if errors else ""
    except subprocess.TimeoutExpired as expired:
        said = (expired.stdout or b"").decode()
        reason = f"the trials did not end within {TIMEOUT:.0f} s"
    for line in said.splitlines():
        with suppress(ValueError, TypeError):  # a line that a library printed
            results.update(json.loads(line))
    return {name: results[name] for name in names if name in results}, reason


if __name__ == "__main__":
    main()
