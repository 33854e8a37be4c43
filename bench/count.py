"""Counts what a training step does on a GPU: `python -m simgpu --memory 8GiB -m bench.count`.

A simulated GPU runs a few layers of GPT-2's width on a few short sequences, for each trainer, and
tells which bytes each launch reads and writes, each once. A count of L layers and N tokens is
f(L, N) = a + b L + c N + d L N: four small steps give the whole step's. Launches are those of the
larger N, because the compiler cuts some sums of fewer tokens in two.
"""

import json
import os
import pkgutil
import re
import tempfile
import threading
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, get_args
from unittest import mock

import torch

from bench import records, report
from bench.trainers import TRAINERS, Benchmark, base_config, with_batch
from fastgpt import flags
from fastgpt.config.config import Config
from fastgpt.errors import UserError, run_command
from fastgpt.kernels.cross_entropy.chunks import GPU_SHARE, chunk_on_gpu
from fastgpt.kernels.runtime import H100_BYTES, H100_PROCESSORS

RECORD = Path(__file__).parent / "results" / "counts.json"
PAGE = report.DOCS / "benchmarks" / "counts.md"
RECIPE, BATCH, CONTEXT = "gpt2-124m", 16, 1024  # the step that is counted
BATCHES, TOKENS = (4, 8), 64  # numbers of sequences in a small step, and tokens in each
Trainer = Literal["fastgpt triton", "fastgpt triton, fp32 residual", "eager", "compiled"]
FIELDS = ("launches", "read", "written", "flops")  # bytes read and written; FLOPs of products
Counts = dict[str, dict[str, float]]  # part -> field -> number

# The first match decides for what is launched up to the end of the backward.
NAMES = (
    ("data", r"^copy to the device"),
    ("collectives", r"^nccl"),
    ("attention", r"^attention$|_attention_"),
    ("head and loss", r"cross_entropy|softmax|nll_loss|^aten::(ne|frexp|reciprocal|clamp|mul|div|"
                      r"fill_)$"),
    ("embedding and casts", r"embedding(?!.*layer_norm)(?!.*rms_norm)"),
    ("norms", r"_norm|_reduce_partials"),
    ("activation", r"gelu|bias_act|relu"),
    # Inductor's kernels for several things at once, mostly casts, have no names
    ("embedding and casts", r"^triton_poi_fused(__to_copy)?(_t)?$|^aten::(copy_|_to_copy)$"),
    ("projections", r"mm$|mm_$|sum|_to_copy|cat"),
)  # fmt: skip
PARTS = (*dict.fromkeys(part for part, _ in NAMES), "other", "clipping", "optimizer")


@dataclass(frozen=True, kw_only=True, slots=True)
class CountBench:
    """Counts the launches, bytes and products of a training step, beside other trainers'."""

    trainers: tuple[Trainer, ...] = get_args(Trainer)
    """Trainers to count, by their names in bench.step; the record keeps its others."""
    nanogpt: Path | None = None
    """Path of a nanoGPT checkout, whose model.py is imported; its step is counted, too."""
    nanochat: Path | None = None
    """Path of a nanochat checkout, the same; its GPT is another network, and has AdamW here."""


def part_of(work: Any, table: int) -> str:
    """Returns the part of a forward or backward that work belongs to, mostly by its name."""
    # The head's are also products with its weight, of `table` elements, and casts of that
    name = re.sub(r"_\d+$", "", work.name)
    part = next((part for part, pattern in NAMES if re.search(pattern, name)), "other")
    product = work.multiply_adds > 0 and work.multiply_adds % table == 0
    number = work.name == "aten::sum" and work.written == 4
    cast = part == "embedding and casts" and work.written >= 2 * table
    return "head and loss" if product or number or cast else part


def by_part(works: list[Any], table: int) -> Counts:
    """Sums the work of a step, in order, by part.

    What follows the backward, which autograd's thread asks for, is clipping up to the optimizer.
    """
    found: Counts = {part: dict.fromkeys(FIELDS, 0.0) for part in PARTS}
    after, main = "clipping", threading.get_native_id()
    last = max(i for i, work in enumerate(works) if work.thread != main)
    for i, work in enumerate(works):
        if i > last and work.name in ("aten::_foreach_add_", "aten::_fused_adamw_"):
            after = "optimizer"
        part = after if i > last else part_of(work, table)
        for key, value in zip(FIELDS, (1, work.read, work.written, 2 * work.multiply_adds)):
            found[part][key] += value
    return found


def chunks_at(config: Config, tokens: int) -> int:
    """Returns in how many chunks our loss takes the tokens of a whole step, on an H100."""
    vocab = config.model.padded_vocab
    room = H100_BYTES // GPU_SHARE // (2 * vocab)
    return -(-tokens // chunk_on_gpu(tokens, vocab, config.model.dim, room, H100_PROCESSORS))


def count(name: str, whole: Benchmark, layers: int, batch: int) -> tuple[Counts, int, int]:
    """Returns the counts of a small step on the simulated GPU, its waits and its cudaMallocs.

    Our loss takes its tokens in as many chunks as the whole step's. The backwards of norms and
    activation, which are as many programs as the GPU runs at once, are fewer here, in proportion.
    """
    import simgpu

    torch.set_num_threads(1)
    model = replace(whole.config.model, num_layers=layers, context=TOKENS)
    benchmark = with_batch(replace(whole, config=replace(whole.config, model=model)), batch)
    share, chunks = benchmark.tokens / whole.tokens, chunks_at(whole.config, whole.tokens)
    chunk = -(-benchmark.tokens // chunks)

    def fewer(op: str) -> Any:
        path = f"fastgpt.kernels.{op}.device.bwd_programs"
        programs = pkgutil.resolve_name(path)
        return mock.patch(path, lambda *args: max(1, round(programs(*args) * share)))

    # functions, because a Mock would keep the tensors of all calls, and so allocate in each step
    loss = mock.patch("fastgpt.kernels.cross_entropy.linear.tokens_at_a_time", lambda *_: chunk)  # noqa: PT008
    with loss, fewer("norm"), fewer("bias_act"):
        step, _ = TRAINERS[name](benchmark)
        for _ in range(3):  # then what is compiled or allocated once is done
            step()
        torch.cuda.synchronize()
        before = simgpu.waits(), simgpu.counts()["cudaMalloc"]
        with simgpu.trace() as works:
            step()
        waits = sum((simgpu.waits() - before[0]).values())
        allocations = simgpu.counts()["cudaMalloc"] - before[1]
    return by_part(works, model.padded_vocab * model.dim), waits, allocations


def predicted(corners: dict[tuple[int, int], Counts], config: Config) -> Counts:
    """Returns f(L, N) of a step by part, from counts at two numbers of layers and of sequences."""
    layers, batch, context = config.model.num_layers, config.global_batch, config.model.context
    (l0, b0), *_, (l1, b1) = sorted(corners)
    deeper, longer = (layers - l0) / (l1 - l0), (batch * context / TOKENS - b0) / (b1 - b0)

    def value(part: str, key: str) -> float:
        at = {size: counts[part][key] for size, counts in corners.items()}
        share = 1 if key == "launches" else longer
        few, many = ((1 - share) * at[n, b0] + share * at[n, b1] for n in (l0, l1))
        return (1 - deeper) * few + deeper * many

    parts = {part: {key: value(part, key) for key in FIELDS} for part in PARTS}
    # two products forward and five backward, each over half of the scores
    parts["attention"]["flops"] = 7 * batch * context**2 * config.model.dim * layers
    return parts


ABOUT = """\
# A training step, counted

What a step of {recipe} with B = {batch}, T = {context} ({precision}, {optimizer}) launches and \
moves on one GPU. It was counted on the [simulated GPU](../proof.md#the-simulated-gpu), which has \
no speed: \
[bench/count.py](../../bench/count.py) says how, and the record is \
[bench/results/counts.json](../../bench/results/counts.json).

f(L, N) = a + b L + c N + d L N, from two L and N = 256 and 512 tokens in sequences of 64 (the \
corners in the record); the whole step has L = {layers}, N = {tokens:,}, and the launches of the \
larger N (off by one where a launch serves several layers, like ours that sums partial gradients). \
A launch's bytes are counted once each: what it reads twice from the L2 cache, or from memory \
because that is full, is one read. An operator of PyTorch's is one launch and moves its tensors. \
Positions beyond the 64 have no weights there, which leaves out 0.02 GB.

{whole}

By part, launches / GB / TFLOP:

{parts}
"""


def cells(*parts: dict[str, float]) -> tuple[str, str, str]:
    """Formats the launches, GB and TFLOP of parts together."""
    launches, read, written, flops = (sum(part[key] for part in parts) for key in FIELDS)
    return f"{launches:.0f}", f"{(read + written) / 1e9:.2f}", f"{flops / 1e12:.2f}"


def page(record: dict[str, Any]) -> str:
    """Returns the page of a record, in Markdown."""
    found = record["trainers"]
    sums = [
        (name, *cells(*it["parts"].values()), str(it["waits"]), str(it["allocations"]))
        for name, it in found.items()
    ]
    rows = {part: [it["parts"][part] for it in found.values()] for part in PARTS}
    parts = [
        (part, *(" / ".join(cells(it)) for it in row))
        for part, row in rows.items()
        if any(it["launches"] for it in row)
    ]
    whole = report.table("trainer|launches|GB moved|TFLOP of products|waits|allocations", sums)
    table = report.table("|".join(("part", *found)), parts)
    tokens = record["batch"] * record["context"]
    return ABOUT.format(**record, tokens=tokens, whole=whole, parts=table)


def count_whole(name: str, whole: Benchmark) -> dict[str, Any]:
    """Returns what the record has of a trainer, from small steps in processes of their own."""
    # nanochat's layers differ by turns; ours launch a single layer with the embedding
    layers = (2, 4) if name == "nanochat" or name.startswith("fastgpt") else (1, 2)
    sizes = [(number, batch) for number in layers for batch in BATCHES]
    with ProcessPoolExecutor(2, get_context("spawn"), max_tasks_per_child=1) as pool:
        jobs = [pool.submit(count, name, whole, *size) for size in sizes]
    parts, waits, allocations = zip(*(job.result() for job in jobs))
    return {
        "commit": records.described("cuda")["commit"],
        "parts": predicted(dict(zip(sizes, parts)), whole.config),
        "waits": max(waits), "allocations": max(allocations),
        "corners": {f"{L}, {B}": counts for (L, B), counts in zip(sizes, parts)},
    }  # fmt: skip


def main(argv: list[str]) -> None:
    bench = flags.command(CountBench, argv, prog="python -m bench.count")
    if "SIMGPU" not in os.environ:
        command = "build/simgpu/bin/python -m simgpu --memory 8GiB -m bench.count"
        raise UserError(f"there is no simulated GPU: expected {command}")
    found = json.loads(RECORD.read_text())["trainers"]  # others stay, each with its own commit
    peers = {"nanogpt": bench.nanogpt, "nanochat": bench.nanochat}
    with tempfile.TemporaryDirectory() as folder:
        config = base_config(RECIPE, "cuda", Path(folder, "text"), context=CONTEXT)
        whole = Benchmark(config=config, on="cuda", precision="bf16", **peers)
        for name in (*bench.trainers, *filter(peers.get, peers)):
            found[name] = count_whole(name, with_batch(whole, BATCH))
            print(name, dict(zip(("launches", "GB"), cells(*found[name]["parts"].values()))))
    record = {
        **records.described("cuda"), "recipe": RECIPE, "batch": BATCH, "context": CONTEXT,
        "layers": config.model.num_layers, "vocab_size": config.model.vocab_size,
        "precision": "bf16", "optimizer": config.optim.kind, "trainers": found,
    }  # fmt: skip
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    PAGE.write_text(page(record))
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    run_command(main)
