"""Counts what a training step does on a GPU: `python -m simgpu --memory 8GiB -m bench.count`.

A simulated GPU runs a few layers of GPT-2's width on a few short sequences, for each trainer, and
tells of each launch which bytes it reads and writes, each once. A count f is a sum of what does not
depend on layers and tokens, of what each layer and what each token adds, and of what each token
adds in each layer:

    f(L, N) = a + b L + c N + d L N

Counts at two L and two N give a to d, and with them the count of the whole step. Launches are those
of the larger N: they do not grow with tokens, but the compiler cuts some sums of fewer in two.
Products are counted from their sizes, attention's by formula (half of the scores, 7 products).
"""

import json
import multiprocessing
import os
import pkgutil
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from bench import implementations, records, tables
from bench.implementations import Benchmark
from bench.step import StepBench, base_config, with_batch
from fastgpt import flags
from fastgpt.config.config import Config
from fastgpt.config.recipes import RECIPES
from fastgpt.errors import UserError, run_command, unknown_name
from fastgpt.kernels.cross_entropy.chunks import GPU_SHARE, chunk_on_gpu
from fastgpt.kernels.runtime import H100_BYTES, H100_PROCESSORS

HERE = Path(__file__).parent
RECORD = HERE / "counts.json"
PAGE = HERE.parent / "docs" / "benchmarks" / "counts.md"
BATCHES, TOKENS = (4, 8), 64
"""The sizes that are run: numbers of sequences, and tokens in a sequence."""
UNTRACED = 3
"""Number of steps before the one that is counted: what is compiled or allocated once is done."""
CHUNKS = "fastgpt.kernels.cross_entropy.linear.tokens_at_a_time"
PROGRAMS = tuple(f"fastgpt.kernels.{op}.device.bwd_programs" for op in ("norm", "bias_act"))
FIELDS = ("launches", "read", "written", "flops")

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
_PATTERNS = [(part, re.compile(pattern)) for part, pattern in NAMES]


@dataclass(frozen=True, kw_only=True, slots=True)
class CountBench:
    """Counts the launches, bytes and products of a training step, beside other trainers'."""

    trainers: tuple[str, ...] = (
        "fastgpt triton", "fastgpt triton, fp32 residual", "eager", "compiled",
    )  # fmt: skip
    """Names of the trainers, as bench.step has them. nanogpt and nanochat are added if given."""
    recipe: str = "gpt2-124m"
    """Recipe of the network and settings."""
    batch: int = 16
    """Number of sequences in the step that is counted."""
    context: int = 1024
    """Number of tokens in each sequence."""
    nanogpt: Path | None = None
    """Path of a nanoGPT checkout, whose model.py is imported."""
    nanochat: Path | None = None
    """Path of a nanochat checkout, whose nanochat/gpt.py is imported."""
    add: bool = False
    """Keep what the record says of other trainers; each has its own commit there."""
    processes: int = 2
    """Number of processes that count at the same time."""
    out: Path = RECORD
    """File for the record."""
    page: Path = PAGE
    """File for the page."""

    def __post_init__(self) -> None:
        for name in ("batch", "context", "processes"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name} is {getattr(self, name)}: expected 1 or more")
        if not (self.trainers or self.nanogpt or self.nanochat):
            raise UserError("--trainers is empty: expected at least one, --nanogpt or --nanochat")
        if self.add and not self.out.exists():
            raise UserError(f"--add: {self.out} does not exist: expected a record")
        for path in (self.out, self.page):
            if not path.parent.is_dir():
                raise UserError(f"{path}: {path.parent} does not exist: expected a folder")


Work = Any
PartCounts = dict[str, float]
Task = tuple[str, Benchmark, float, int]
"""The arguments of `count`."""
Counts = dict[str, PartCounts]
"""For each part: launches, bytes read and written, floating-point operations of products."""


def part_of(name: str) -> str:
    """Returns the part of a forward or backward that work belongs to, by its name."""
    plain = re.sub(r"_\d+$", "", name)
    return next((part for part, pattern in _PATTERNS if pattern.search(plain)), "other")


def is_of_head(work: Work, part: str, table: int) -> bool:
    """Returns True for products with the head's weight, casts of it, and sums to one number."""
    product = work.multiply_adds > 0 and work.multiply_adds % table == 0
    number = work.name == "aten::sum" and work.written == 4
    return product or number or (part == "embedding and casts" and work.written >= 2 * table)


def by_part(works: list[Work], table: int) -> Counts:
    """Sums the work of a step, in order, by part.

    What follows the backward, which autograd's thread asks for, is clipping up to the optimizer.

    Args:
        table: elements of the head's weight (V, C), by which its products and casts are known.
    """
    found: Counts = {part: dict.fromkeys(FIELDS, 0.0) for part in PARTS}
    main = threading.get_native_id()
    backward = [i for i, work in enumerate(works) if work.thread != main]
    steps = False
    for i, work in enumerate(works):
        part = part_of(work.name)
        if i > backward[-1]:
            steps = steps or work.name in ("aten::_foreach_add_", "aten::_fused_adamw_")
            part = "optimizer" if steps else "clipping"
        elif is_of_head(work, part, table):
            part = "head and loss"
        row = found[part]
        row["launches"] += 1
        row["read"] += work.read
        row["written"] += work.written
        row["flops"] += 2 * work.multiply_adds
    return found


def fixed(value: int) -> Callable[..., int]:
    return lambda *_: value


@contextmanager
def as_in(step_tokens: float, chunks: int, tokens: int) -> Iterator[None]:
    """Lets our kernels divide few tokens as they divide a whole step's.

    The loss takes them in as many chunks; the backwards of norms and activation, which are as many
    programs as the GPU runs at once, have fewer, whose partial sums are fewer bytes.
    """

    def fewer(function: Callable[..., int]) -> Callable[..., int]:
        return lambda *args: max(1, round(function(*args) * tokens / step_tokens))

    with ExitStack() as patches:
        # a Mock would keep the tensors of all calls, and so allocate in each step
        patches.enter_context(mock.patch(CHUNKS, fixed(-(-tokens // chunks))))
        for name in PROGRAMS:
            patches.enter_context(mock.patch(name, fewer(pkgutil.resolve_name(name))))
        yield


def count(name: str, benchmark: Benchmark, step_tokens: float, chunks: int) -> dict[str, Any]:
    """Counts one step of a trainer on the simulated GPU.

    Args:
        name: a key of `bench.implementations.IMPLEMENTATIONS`.
        benchmark: a small one.
        whole: tokens of the whole step that it stands for.
        chunks: number of chunks in which our loss takes them.

    Returns:
        dict[str, Any]: "parts" (`Counts`), "waits", "allocations" (by cudaMalloc).
    """
    import simgpu

    model = benchmark.config.model
    tokens = benchmark.tokens
    with as_in(step_tokens, chunks, tokens):
        step, facts = implementations.IMPLEMENTATIONS[name](benchmark)
        for _ in range(UNTRACED):
            step()
        torch.cuda.synchronize()
        waits, allocated = simgpu.waits(), simgpu.counts()["cudaMalloc"]
        with simgpu.trace() as works:
            step()
        waited = sum((simgpu.waits() - waits).values())
    return {
        "parts": by_part(works, model.padded_vocab * model.dim),
        "waits": waited,
        "allocations": simgpu.counts()["cudaMalloc"] - allocated,
        "facts": {key: facts[key] for key in ("optimizer", "precision")},
    }


def layers_of(name: str) -> tuple[int, int]:
    """Returns the numbers of layers that are run.

    Of nanochat every second one is different; of ours a single one is launched with the embedding.
    """
    return (2, 4) if name == "nanochat" or name.startswith("fastgpt") else (1, 2)


def extrapolated(
    corners: dict[tuple[int, int], PartCounts], layers: int, batch: float
) -> PartCounts:
    """Returns f(L, N) for a whole step, from the counts at four corners of (layers, batch).

    Args:
        corners: counts of a part at two numbers of layers and of sequences.
        batch: in sequences of the length that the corners have.
    """
    l0, l1 = sorted({layers for layers, _ in corners})
    b0, b1 = sorted({batch for _, batch in corners})
    at, along = (layers - l0) / (l1 - l0), (batch - b0) / (b1 - b0)

    def line(key: str, layers: int, along: float) -> float:
        return (1 - along) * corners[layers, b0][key] + along * corners[layers, b1][key]

    def value(key: str) -> float:
        share = 1 if key == "launches" else along
        return (1 - at) * line(key, l0, share) + at * line(key, l1, share)

    return {key: value(key) for key in FIELDS}


def chunks_at(config: Any, batch: int, context: int) -> int:
    """Returns in how many chunks our loss takes the tokens of a whole step, on an H100."""
    model, tokens = config.model, batch * context
    vocab = model.padded_vocab
    size = chunk_on_gpu(
        tokens, vocab, model.dim, H100_BYTES // GPU_SHARE // (2 * vocab), H100_PROCESSORS
    )
    return -(-tokens // size)


def attention_flops(layers: int, batch: int, context: int, dim: int) -> float:
    """Counts two products forward and five backward, each over half of the scores."""
    return 7 * batch * context**2 * dim * layers


def predicted(
    found: dict[tuple[int, int], dict[str, Any]], layers: int, batch: int, context: int, dim: int
) -> Counts:
    """Returns the counts of a whole step, by part."""
    along = batch * context / TOKENS
    parts = {
        part: extrapolated({at: it["parts"][part] for at, it in found.items()}, layers, along)
        for part in PARTS
    }
    parts["attention"]["flops"] = attention_flops(layers, batch, context, dim)
    return parts


def total(counts: Counts) -> PartCounts:
    return {key: sum(row[key] for row in counts.values()) for key in FIELDS}


def recorded(name: str, config: Config) -> Counts | None:
    """Returns the counts of a trainer's step by part, as the record foretells them.

    Returns:
        Counts | None: None for another trainer, network or optimizer than the record's, and where
        our loss divides the tokens into another number of chunks.
    """
    record = json.loads(RECORD.read_text())
    found, model = record["trainers"].get(name), config.model
    counted = replace(
        RECIPES[record["recipe"]][1].model,
        num_layers=model.num_layers, context=model.context, vocab_size=record["vocab_size"],
    )  # fmt: skip
    if found is None or model != counted or config.optim.kind != record["optimizer"]:
        return None
    sizes = (config.global_batch, model.context), (record["batch"], record["context"])
    if len({chunks_at(config, *size) for size in sizes}) > 1:
        return None
    corners = {
        (int(layers), int(batch)): {"parts": counts}
        for at, counts in found["corners"].items()
        for layers, batch in [at.split(", ")]
    }
    return predicted(corners, model.num_layers, config.global_batch, model.context, model.dim)


# --- the page -------------------------------------------------------------------------------------


NANOCHAT = (
    " nanochat's GPT is another network of these sizes (rotary positions, value embeddings, an "
    "untied head, no biases); it has AdamW here like the others, not its own optimizer."
)


def _cells(row: PartCounts) -> tuple[str, ...]:
    moved = (row["read"] + row["written"]) / 1e9
    return f"{row['launches']:.0f}", f"{moved:.2f}", f"{row['flops'] / 1e12:.2f}"


def page(record: dict[str, Any]) -> str:
    """Returns the page of a record, in Markdown."""
    names = [*record["trainers"]]
    sums = {name: total(it["parts"]) for name, it in record["trainers"].items()}
    lines = [
        (name, *_cells(sums[name]), str(it["waits"]), str(it["allocations"]))
        for name, it in record["trainers"].items()
    ]
    by_part_ = [
        (part, *(" / ".join(_cells(record["trainers"][name]["parts"][part])) for name in names))
        for part in PARTS
        if any(record["trainers"][name]["parts"][part]["launches"] for name in names)
    ]
    return "\n\n".join((
        "# A training step, counted",
        f"What a step of {record['recipe']} with B = {record['batch']}, T = {record['context']} "
        f"({record['precision']}, {record['optimizer']}) launches and moves on one GPU. It was "
        "counted on the [simulated GPU](../simgpu.md), which has no speed: "
        "[bench/count.py](../../bench/count.py) says how, and the record is "
        "[bench/counts.json](../../bench/counts.json).",
        "f(L, N) = a + b L + c N + d L N, from two L and N = "
        f"{' and '.join(str(TOKENS * b) for b in BATCHES)} tokens in sequences of {TOKENS} (the "
        f"corners in the record); the whole step has L = {record['layers']}, N = "
        f"{record['batch'] * record['context']:,}, and the launches of the larger N (off by one "
        "where a launch serves several layers, like ours that sums partial gradients). A launch's "
        "bytes are counted once each: what it reads twice from the L2 cache, or from memory "
        "because that is full, is one read. An operator of PyTorch's is one launch and moves its "
        "tensors. Positions beyond the "
        f"{TOKENS} have no weights there, which leaves out 0.02 GB."
        + NANOCHAT * ("nanochat" in names),
        tables.table("trainer|launches|GB moved|TFLOP of products|waits|allocations", lines),
        "By part, launches / GB / TFLOP:",
        tables.table("|".join(("part", *names)), by_part_),
    )) + "\n"  # fmt: skip


# --- all of it ------------------------------------------------------------------------------------


def _count(task: Task) -> dict[str, Any]:
    torch.set_num_threads(1)
    return count(*task)


def small(benchmark: Benchmark, layers: int, batch: int) -> Benchmark:
    """Returns the benchmark at a size that a simulated GPU can run."""
    model = replace(benchmark.config.model, num_layers=layers, context=TOKENS)
    config = replace(benchmark.config, model=model)
    return with_batch(replace(benchmark, config=config), batch)


def count_all(tasks: Iterable[Task], processes: int) -> Iterable[dict[str, Any]]:
    """Counts each task in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(processes, maxtasksperchild=1) as pool:
        yield from pool.imap(_count, tasks)


SETTINGS = ("recipe", "batch", "context")


def recorded_trainers(bench: CountBench) -> dict[str, Any]:
    """Returns the trainers of the record, which must be of the same step.

    Raises:
        UserError: it is not.
    """
    record = json.loads(bench.out.read_text())
    for name in SETTINGS:
        if record[name] != getattr(bench, name):
            raise UserError(f"--{name} is {getattr(bench, name)}: {bench.out} has {record[name]}")
    return record["trainers"]


def run(bench: CountBench, say: Callable[[str], None] = print) -> Path:
    """Counts, writes record and page, and returns the page's path."""
    if "SIMGPU" not in os.environ:
        raise UserError(
            "there is no simulated GPU: expected "
            "build/simgpu/bin/python -m simgpu --memory 8GiB -m bench.count"
        )
    added = [name for name in ("nanogpt", "nanochat") if getattr(bench, name) is not None]
    names = (*bench.trainers, *added)
    if unknown := [name for name in names if name not in implementations.IMPLEMENTATIONS]:
        raise unknown_name("trainer", unknown[0], implementations.IMPLEMENTATIONS)
    text = bench.out.with_suffix(".txt")
    try:
        config = base_config(StepBench(recipe=bench.recipe, context=bench.context), "cuda", text)
        benchmark = Benchmark(
            config=config,
            on="cuda",
            precision="bf16",
            nanogpt=bench.nanogpt,
            nanochat=bench.nanochat,
        )
        about = records.described("cuda")
        parts = chunks_at(config, bench.batch, bench.context)
        corners = {
            name: [(layers, batch) for layers in layers_of(name) for batch in BATCHES]
            for name in names
        }
        step_tokens = bench.batch * bench.context
        tasks = [
            (name, small(benchmark, *at), step_tokens, parts)
            for name in names
            for at in corners[name]
        ]
        found = iter(count_all(tasks, bench.processes))
        trainers = recorded_trainers(bench) if bench.add else {}
        for name in names:
            of = {at: next(found) for at in corners[name]}
            size = (config.model.num_layers, bench.batch, bench.context, config.model.dim)
            trainers[name] = {
                "commit": about["commit"],
                "parts": predicted(of, *size),
                "waits": max(it["waits"] for it in of.values()),
                "allocations": max(it["allocations"] for it in of.values()),
                "corners": {
                    f"{layers}, {batch}": it["parts"] for (layers, batch), it in of.items()
                },
            }
            say(f"{name}: {' launches, '.join(_cells(total(trainers[name]['parts']))[:2])} GB")
    finally:
        text.unlink(missing_ok=True)
    settings = {name: getattr(bench, name) for name in SETTINGS}
    record = {
        **about, **settings, "layers": config.model.num_layers,
        "vocab_size": config.model.vocab_size, "precision": "bf16",
        "optimizer": config.optim.kind, "trainers": trainers,
    }  # fmt: skip
    bench.out.write_text(json.dumps(record, indent=1) + "\n")
    bench.page.write_text(page(record))
    return bench.page


def main(argv: list[str]) -> None:
    print(run(flags.command(CountBench, argv, prog="python -m bench.count")))


if __name__ == "__main__":
    run_command(main)
