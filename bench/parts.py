"""Breaks a training step's time into parts: its kernels by kind, and the time without a kernel.

The times come from torch's profiler. A GPU's kernels are told apart by their names, a CPU's ops by
theirs, without the ops inside them. Time that no kernel covers belongs to the host: a gap, or
waiting for data.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.timing import limit
from fastgpt.config.model import ModelConfig
from fastgpt.errors import UserError
from fastgpt.kernels.specs import SPECS

PARTS: tuple[str, ...] = (
    *("GEMM", "attention", "norm", "loss", "optimizer", "other"),
    *("data wait", "host gap"),
)
STEPS = 3
"""Number of steps that are profiled, after one that is not."""
LARGEST = 40
"""Number of kernels of a step whose times are kept."""

# The first match decides; Inductor's fused kernels name the ops in them. Among a CPU's eager ops,
# batched products are attention's: all others have one weight for the whole batch.
NAMES = (
    ("loss", r"cross_entropy|nll_loss|log_softmax"),
    ("attention", r"flash|fmha|sdpa|scaled_dot_product|_attention_|attn|"
                  r"aten::(baddbmm|bmm|_softmax|_softmax_backward_data|masked_fill_?)$"),
    ("optimizer", r"multi_tensor|_adamw?_|foreach|lerp|clip_grad"),
    ("norm", r"layer_?norm|rms_?norm|_norm_(fwd|bwd)|reduce_partials|GammaBeta"),
    ("GEMM", r"gemm|nvjet|cutlass|cublas|splitk|xmma|"
             r"aten::(addmm|mm|linear|mkldnn_linear|_addmm_activation)$|mkldnn::_linear"),
)  # fmt: skip
_COMPILED = tuple((part, re.compile(pattern, re.IGNORECASE)) for part, pattern in NAMES)


def part_of(name: str) -> str:
    """Returns the part of a step (GEMM, attention, ...) that a kernel or op belongs to, by name."""
    return next((part for part, pattern in _COMPILED if pattern.search(name)), "other")


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Returns the length of time that the intervals cover together."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def profile(step: Callable[[], None], on: str, trace: Path | None = None) -> dict[str, Any]:
    """Measures the milliseconds of one training step by part, averaged over a few steps.

    Kernels that overlap on a GPU count in full, each in its part; the host gap is the time of the
    step when no kernel runs.

    Args:
        trace: file for a Chrome trace of these steps, compressed if it ends in .gz.

    Returns:
        dict[str, Any]: `parts`, the milliseconds of each; `kernels`, on a GPU: (name, milliseconds,
            launches) of the LARGEST in a step.

    Raises:
        UserError: the profiler saw no kernel.
    """
    from torch.profiler import ProfilerActivity

    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on == "cuda" else [])
    waited: Callable[[], float] = getattr(step, "waited", lambda: 0.0)
    step()
    if on == "cuda":
        torch.cuda.synchronize()
    before = waited()
    with (
        torch.profiler.profile(activities=kinds) as profiler,
        torch.profiler.record_function("fastgpt::steps"),
    ):
        for _ in range(STEPS):
            step()
        if on == "cuda":
            torch.cuda.synchronize()
    events: Sequence[Any] = profiler.events() or ()
    marks = (e for e in events if e.name == "fastgpt::steps" and not _on_gpu(e))
    wall = next(marks).time_range.elapsed_us()
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    spent = _of_kernels(events) if on == "cuda" else _of_ops(events)
    busy = spent.pop("busy")
    if not busy:
        raise UserError("the profiler saw no kernel; it may lack access to the GPU's counters")
    waiting = min(1e6 * (waited() - before), max(wall - busy, 0.0))
    spent["data wait"] = waiting
    spent["host gap"] = max(wall - busy - waiting, 0.0)
    found = {part: spent.get(part, 0.0) / STEPS / 1e3 for part in PARTS}
    return {"parts": found, "kernels": _largest(events)}


def _largest(events: Sequence[Any]) -> list[tuple[str, float, float]]:
    us, launches = Counter[str](), Counter[str]()
    for event in events:
        if _on_gpu(event) and not _is_mark(event):
            us[event.name] += event.time_range.elapsed_us()
            launches[event.name] += 1
    largest = us.most_common(LARGEST)
    return [(name, time / STEPS / 1e3, launches[name] / STEPS) for name, time in largest]


def _on_gpu(event: Any) -> bool:
    return str(event.device_type).endswith("CUDA")


def _is_mark(event: Any) -> bool:
    """Returns True for a named profiler range, which encloses kernels but is none itself."""
    named = event.name.startswith(("fastgpt::", "Optimizer.", "ProfilerStep"))
    return named or getattr(event, "is_user_annotation", False)


def _of_kernels(events: Sequence[Any]) -> dict[str, float]:
    spent, intervals = dict.fromkeys(PARTS, 0.0), []
    for event in events:
        if _on_gpu(event) and not _is_mark(event):
            start, end = event.time_range.start, event.time_range.end
            spent[part_of(event.name)] += end - start
            intervals.append((start, end))
    return {**spent, "busy": covered(intervals)}


def _of_ops(events: Sequence[Any]) -> dict[str, float]:
    """Sums the profiler's self time by part of the model.

    An op that belongs to no part counts towards its nearest enclosing op that does.
    """
    spent = dict.fromkeys(PARTS, 0.0)
    for event in events:
        chain, around = [], event
        while around is not None:
            chain.append(around.name)
            around = around.cpu_parent
        part = next((p for p in map(part_of, chain) if p != "other"), "other")
        if any(name.startswith("Optimizer.step") for name in chain):
            part = "optimizer"  # Muon multiplies matrices, too
        if "::" in event.name and event.name != "fastgpt::steps":
            spent[part] += event.self_cpu_time_total
    return {**spent, "busy": sum(spent.values())}


# --- limits ---------------------------------------------------------------------------------------


def limits(
    config: ModelConfig, tokens: int, size: int, peaks: dict[str, float], *, muon: bool = False
) -> dict[str, float]:
    """Computes the shortest time in milliseconds that each part of a step can take on this machine.

    GEMM: 6 FLOPs for each weight and token. Attention: what its `Spec` counts, forward and
    backward. Norm: the bytes of 2 L + 1 of them, forward and backward, all but the first after a
    sum. Loss: the logits read once and their gradient written. Optimizer: AdamW's 28 bytes for each
    parameter, and Muon's products. The other parts have no such limit.

    Args:
        tokens: number of tokens in a step.
        size: bytes of an activation.
        peaks: rates, `matmul` and `copy`.
        muon: the blocks' matrices are updated by Muon, in 5 iterations.
    """
    C, V, T = config.dim, config.padded_vocab, config.context
    up = 2 * config.ffn_width if config.activation == "swiglu" else config.ffn_width
    heads = config.num_heads + 2 * config.kv_heads
    outputs = config.num_heads * config.head_dim
    shapes = [(C, heads * config.head_dim), (outputs, C), (C, up), (config.ffn_width, C)]
    block = sum(rows * columns for rows, columns in shapes)
    pairs = [(min(shape), max(shape)) for shape in shapes] if muon else []
    iterated = 5 * config.num_layers * sum(2 * m * m * (2 * n + m) for m, n in pairs)
    weights = config.num_layers * block + V * C
    one = {"B": tokens // T, "T": T, "H": config.num_heads, "D": config.head_dim}
    attention = limit(*SPECS["attention"].work(one, size)["both"], peaks)[0] * config.num_layers
    rows = {"M": tokens, "N": C}
    norm_bytes = 2 * config.num_layers * SPECS["add_layer_norm"].work(rows, size)["both"][1]
    norm_bytes += SPECS["layer_norm"].work(rows, size)["both"][1]
    seconds = {
        "GEMM": 6 * weights * tokens / peaks["matmul"],
        "attention": attention,
        "norm": norm_bytes / peaks["copy"],
        "loss": 2 * tokens * V * size / peaks["copy"],
        "optimizer": 28 * (weights + T * C) / peaks["copy"] + iterated / peaks["matmul"],
    }
    return {part: 1e3 * seconds.get(part, 0.0) for part in PARTS}


GROUPS = (
    ("products and loss", ("GEMM", "loss"), ("projections", "head and loss")),
    ("attention", ("attention",), ("attention",)),
    ("norms", ("norm",), ("norms",)),
    ("clipping and optimizer", ("optimizer",), ("clipping", "optimizer")),
    ("rest", ("other",), ("data", "embedding and casts", "activation", "other")),
)
"""Parts that are measured here -> the parts of `bench.count` in them."""


def beside_counts(
    spent: dict[str, float], counts: dict[str, dict[str, float]], peaks: dict[str, float]
) -> list[str]:
    """Describes the measured time of a step's parts beside what `bench.count` foretells.

    That is the time of what was counted on the simulated GPU at this machine's rates: of bytes or
    products, whichever take longer.
    """
    lines = []
    for name, measured, counted in GROUPS:
        rows = [counts[part] for part in counted]
        moved = [row["read"] + row["written"] for row in rows]
        least = sum(
            max(row["flops"] / peaks["matmul"], size / peaks["copy"])
            for row, size in zip(rows, moved, strict=True)
        )
        launches = sum(row["launches"] for row in rows)
        lines.append(
            f"{name}: {sum(spent[part] for part in measured):.2f} ms, foretold {1e3 * least:.2f}"
            f" ({sum(moved) / 1e9:.2f} GB in {launches:.0f} launches)"
        )
    return lines


def explain(spent: dict[str, float], least: dict[str, float], count: int = 3) -> list[str]:
    """Describes the parts of a step that take the most time beyond their limit, one per line."""
    over = sorted(PARTS, key=lambda part: least[part] - spent[part])
    lines = []
    for part in over[:count]:
        share = f"{least[part] / spent[part]:.0%} of its limit" if spent[part] else "nothing"
        lines.append(
            f"{part}: {spent[part]:.2f} ms, {spent[part] - least[part]:.2f} ms over the"
            f" {least[part]:.2f} ms it cannot go below ({share})"
        )
    return lines
