"""Breaks a training step's time into parts: its kernels by kind, and the time without a kernel.

torch's profiler sees a GPU's kernels, or a CPU's ops; their names tell them apart. Time that no
kernel covers belongs to the host: a gap, or waiting for data.
"""

import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from bench.measure import limit
from fastgpt.config.model import ModelConfig
from fastgpt.device.device import synchronize
from fastgpt.errors import UserError
from fastgpt.kernels.specs import SPECS

PARTS = ("GEMM", "attention", "norm", "loss", "optimizer", "other", "data wait", "host gap")
STEPS = 3  # that are profiled, after one that is not

# The first match decides; Inductor's fused kernels name the ops in them. Among a CPU's eager ops,
# batched products are attention's: all others have one weight for the whole batch.
NAMES = {
    "loss": r"cross_entropy|nll_loss|log_softmax",
    "attention": r"flash|fmha|sdpa|scaled_dot_product|_attention_|attn|"
                 r"aten::(baddbmm|bmm|_softmax|_softmax_backward_data|masked_fill_?)$",
    "optimizer": r"multi_tensor|_adamw?_|foreach|lerp|clip_grad",
    "norm": r"layer_?norm|rms_?norm|_norm_(fwd|bwd)|reduce_partials|GammaBeta",
    "GEMM": r"gemm|nvjet|cutlass|cublas|splitk|xmma|"
            r"aten::(addmm|mm|linear|mkldnn_linear|_addmm_activation)$|mkldnn::_linear",
}  # fmt: skip


def part_of(name: str) -> str:
    """Returns the part of a step (GEMM, attention, ...) that a kernel or op belongs to, by name."""
    matches = (part for part, pattern in NAMES.items() if re.search(pattern, name, re.IGNORECASE))
    return next(matches, "other")


def profile(step: Callable[[], None], on: str, trace: Path | None = None) -> dict[str, Any]:
    """Returns the milliseconds of a step's `parts`, and of a GPU's largest `kernels`.

    Kernels are (name, milliseconds, launches). Those that overlap count in full, each in its part.
    `step.waited`, if it is there, returns the seconds spent in waiting for data. A Chrome trace is
    written to `trace`.
    """
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (on == "cuda")
    waited: Callable[[], float] = getattr(step, "waited", lambda: 0.0)
    step()
    synchronize(on)
    before = waited()
    with torch.profiler.profile(activities=kinds) as profiler:
        start = time.perf_counter()
        for _ in range(STEPS):
            step()
        synchronize(on)
        seconds = time.perf_counter() - start
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    events: list[Any] = list(profiler.events() or ())
    on_gpu = [event for event in events if str(event.device_type)[-4:] == "CUDA"]
    spent, busy, kernels = _of_kernels(on_gpu) if on == "cuda" else _of_ops(events)
    if not busy:
        raise UserError("the profiler saw no kernel; it may lack access to the GPU's counters")
    idle: Any = max(1e6 * seconds - busy, 0.0)
    spent["data wait"] = min(1e6 * (waited() - before), idle)
    spent["host gap"] = idle - spent["data wait"]
    return {"parts": {part: spent[part] / STEPS / 1e3 for part in PARTS}, "kernels": kernels}


def _of_kernels(events: list[Any]) -> tuple[Counter[str], float, list[Any]]:
    """Sums the microseconds of a GPU's kernels, without the profiler's ranges around them.

    Returns the sums by part, the time in which any kernel runs, and the largest kernels.
    """
    spent, us, launches = Counter[str](), Counter[str](), Counter[str]()
    busy, reached = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event.time_range.start):
        named = event.name.startswith(("Optimizer.", "ProfilerStep"))
        if named or getattr(event, "is_user_annotation", False):
            continue
        start, end = event.time_range.start, event.time_range.end
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
        spent[part_of(event.name)] += end - start
        us[event.name] += end - start
        launches[event.name] += 1
    largest = us.most_common(40)
    return spent, busy, [(name, t / STEPS / 1e3, launches[name] / STEPS) for name, t in largest]


def _of_ops(events: list[Any]) -> tuple[Counter[str], float, list[Any]]:
    """Sums the same of a CPU's ops, each without the ops inside it.

    An op that belongs to no part counts towards its nearest enclosing op that does.
    """
    spent = Counter[str]()
    for event in events:
        chain, around = [], event
        while around is not None:
            chain.append(around.name)
            around = around.cpu_parent
        part = next((p for p in map(part_of, chain) if p != "other"), "other")
        if any(name.startswith("Optimizer.step") for name in chain):
            part = "optimizer"  # Muon multiplies matrices, too
        if "::" in event.name:
            spent[part] += event.self_cpu_time_total
    return spent, sum(spent.values()), []


def limits(model: ModelConfig, tokens: int, size: int, peaks: dict[str, float]) -> dict[str, float]:
    """Computes the shortest time in milliseconds that each part of a step can take on this machine.

    GEMM: 6 FLOPs for each weight and token. Attention: what its `Spec` counts, forward and
    backward. Norm: the bytes of 2 L + 1 of them, all but the first after a sum. Loss: the logits
    read once and their gradient written. Optimizer: AdamW's 28 bytes for each parameter. The other
    parts have no such limit. `size` is the bytes of an activation.
    """
    L, C, V, T, F = model.num_layers, model.dim, model.padded_vocab, model.context, model.ffn_width
    H, D, K = model.num_heads, model.head_dim, model.kv_heads
    gates = 2 if model.activation == "swiglu" else 1
    weights = L * C * ((2 * H + 2 * K) * D + (gates + 1) * F) + V * C
    heads, rows = {"B": tokens // T, "T": T, "H": H, "D": D}, {"M": tokens, "N": C}
    attention = limit(*SPECS["attention"].work(heads, size)["both"], peaks)[0]
    norm, added = (SPECS[op].work(rows, size)["both"][1] for op in ("layer_norm", "add_layer_norm"))
    seconds = {
        "GEMM": 6 * weights * tokens / peaks["matmul"],
        "attention": L * attention,
        "norm": (norm + 2 * L * added) / peaks["copy"],
        "loss": 2 * tokens * V * size / peaks["copy"],
        "optimizer": 28 * (weights + T * C) / peaks["copy"],
    }
    return {part: 1e3 * seconds.get(part, 0.0) for part in PARTS}
