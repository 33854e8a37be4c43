"""Account of training on many GPUs: `python -m bench.scaling [--publish]`.

Counts the bytes that a step exchanges, its FLOPs and the memory of a rank for each kind of parallel
training, and estimates how much of the communication the computation hides. The formulas of bytes
and of memory are compared with counts of small runs in `tests/bench/test_scaling.py`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from bench.account.__main__ import markdown
from bench.report import DOCS
from bench.scaling.collectives import MACHINE, Plan, Work, exchange, of_muon, padded, units
from bench.scaling.memory import kept_bytes, memory_bytes
from bench.scaling.time import (
    BUSY,
    LINK,
    NETWORKS,
    OUTSIDE_S,
    PEAK,
    START_S,
    compute_seconds,
    exposed_seconds,
    seconds,
)
from fastgpt import flags
from fastgpt.config import ParallelConfig, Recompute
from fastgpt.errors import run_command
from fastgpt.metrics import flops_per_token
from fastgpt.model_config import ModelConfig
from fastgpt.recipes import RECIPES

PAGE = DOCS / "scaling.md"
RANKS = (8, 64, 512, 4096)
ROOM = 80e9
"""Bytes of the GPU's memory."""


def _model(dim: int, num_layers: int, num_heads: int, ffn_dim: int, kv: int) -> ModelConfig:
    return ModelConfig(
        dim=dim, num_layers=num_layers, num_heads=num_heads, ffn_dim=ffn_dim, num_kv_heads=kv,
        context=4096, vocab_size=32_000, norm="rmsnorm", bias=False, activation="swiglu",
        position="rotary", tied=False,
    )  # fmt: skip


MODELS = {
    "gpt2-124m": (RECIPES["gpt2-124m"][1].model, 64),
    "gpt2-1558m": (RECIPES["gpt2-1558m"][1].model, 8),
    "7B": (_model(4096, 32, 32, 11_008, 32), 2),
    "70B": (_model(8192, 80, 64, 28_672, 8), 1),
}
"""Network and sequences of a rank in one step. The last two have the sizes of Llama 2's."""


LONG, CONTEXT = "7B", 32_768


def _fsdp(**options) -> Plan:
    return Plan(ParallelConfig(**{"kind": "fsdp", "dtype": "bf16", **options}))


PLANS = {
    "ddp": Plan(ParallelConfig()),
    "ddp, bf16 gradients": Plan(ParallelConfig(), "bf16"),
    "fsdp, fp32": _fsdp(dtype="fp32"),
    "fsdp": _fsdp(),
    "fsdp, no-reshard": _fsdp(reshard=False),
    "hsdp": _fsdp(kind="hsdp"),
    "hsdp, no-reshard": _fsdp(kind="hsdp", reshard=False),
    f"fsdp, tp {MACHINE}": _fsdp(tp=MACHINE),
}


def long_contexts() -> Iterator[tuple[str, ...]]:
    """Yields a row for each number of ranks that share a long sequence."""
    config = replace(MODELS[LONG][0], context=CONTEXT)
    parts, kept = units(config), kept_bytes(config, 1, narrow=True)
    work, ranks = Work(config, 1), RANKS[1]
    for cp in (1, 2, 4, 8):
        plan = _fsdp(cp=cp)
        own = kept // cp + (config.num_layers * work.keys_bytes if cp > 1 else 0)
        needed = memory_bytes(parts, plan, ranks, own)
        found = list(exchange(parts, plan, ranks, work))
        sent = sum(x.bytes * x.times for at, x in found if at == "context")
        whole, block = compute_seconds(config, config.context // cp)
        cells = []
        for net in NETWORKS:
            waits = sum(x.times * seconds(x, net) for at, x in found if at == "context")
            exposed = exposed_seconds(found, plan, config.num_layers, block, net)
            cells.append(f"{1e3 * waits:,.0f} ms, **{whole / (whole + exposed):.0%}**")
        fits = "" if needed <= ROOM else " †"
        size = f"{needed / 1e9:,.1f}{fits}"
        yield f"{cp}", f"{1e3 * whole:,.0f}", f"{sent / 1e9:.2f}" if sent else "-", size, *cells


def rows(config: ModelConfig, sequences: int) -> Iterator[tuple[str, ...]]:
    whole, block = compute_seconds(config, sequences * config.context)
    for name, plan in PLANS.items():
        tp = plan.parallel.tp
        if any(size % tp for size in (config.num_heads, config.kv_heads, config.ffn_width)):
            continue
        parts, work = units(config, tp), Work(config, sequences * tp)
        kept = kept_bytes(config, work.sequences, narrow=plan.narrow, tp=tp)
        for ranks in RANKS:
            if plan.parallel.kind == "hsdp" and ranks == MACHINE:
                continue  # fsdp
            found = list(exchange(parts, plan, ranks, work))
            sizes = [
                sum(x.bytes * x.times for _, x in found if x.op == op) / 1e9
                for op in ("all_gather", "reduce_scatter", "all_reduce")
            ]
            needed = memory_bytes(parts, plan, ranks, kept)
            cells = []
            for net in NETWORKS:
                every = sum(x.times * seconds(x, net) for _, x in found)
                exposed = exposed_seconds(found, plan, config.num_layers, block, net)
                hidden, share = 1 - exposed / every, whole / (whole + exposed)
                cells.append(f"{1e3 * every:,.0f} ms, {hidden:.0%}, **{share:.0%}**")
            fits = "" if needed <= ROOM else " †"
            figures = [f"{x:.2f}" if x >= 0.005 else "-" for x in sizes]
            yield name, f"{ranks:,}", *figures, f"{needed / 1e9:,.1f}{fits}", *cells


def recomputed() -> Iterator[tuple[str, ...]]:
    """Yields each model's memory with each kind of recomputation, and what it costs."""
    for name, (config, sequences) in MODELS.items():
        parts, plan, ranks = units(config), PLANS["fsdp"], RANKS[1]
        whole, block = compute_seconds(config, sequences * config.context)
        matrices = 2 * sum(shape.numel() for shape in parts[1] if len(shape) == 2)
        products = sequences * config.context * matrices / (BUSY * PEAK)
        again: dict[Recompute, float] = {"none": 0, "selective": products, "full": block}
        cells = []
        for kind, layer_s in again.items():
            kept = kept_bytes(config, sequences, narrow=True, recompute=kind)
            needed = memory_bytes(parts, plan, ranks, kept)
            speed = whole / (whole + config.num_layers * layer_s)
            cells.append(f"{needed / 1e9:,.1f}{'' if needed <= ROOM else ' †'}, **{speed:.0%}**")
        yield name, *cells


def with_muon() -> Iterator[tuple[str, ...]]:
    """Yields what Muon exchanges more than AdamW, and the time of it."""
    for name, (config, _) in MODELS.items():
        for kind in ("ddp", "fsdp", "hsdp"):
            found = list(of_muon(units(config), PLANS[kind], RANKS[1]))
            sent = sum(x.bytes * x.times for x in found) / 1e9
            times = (sum(x.times * seconds(x, net) for x in found) for net in NETWORKS)
            yield name, kind, f"{sent:.2f}", *(f"{1e3 * x:,.0f} ms" for x in times)


def section(name: str, config: ModelConfig, sequences: int) -> str:
    tokens, parameters = sequences * config.context, sum(padded(unit, 1) for unit in units(config))
    flops = tokens * flops_per_token(config)
    head = "Kind|GPUs|all-gather, GB|reduce-scatter, GB|all-reduce, GB|memory, GB"
    table = markdown(
        "|".join((head, *(net.name for net in NETWORKS))), list(rows(config, sequences))
    )
    return f"""## {name}

{parameters / 1e6:,.0f} million parameters, with a padded vocabulary. Step of a rank: {tokens:,}
tokens, {flops / 1e12:,.0f} TFLOP, {1e3 * compute_seconds(config, tokens)[0]:,.0f} ms.

{table}
"""


def page() -> str:
    """Returns the page, in Markdown."""
    nets = [
        (net.name, f"{net.inside / 1e9:g}", f"{net.ports} x {net.port / 1e9:g}", net.source)
        for net in NETWORKS
    ]
    long_head = "|".join(
        (
            "Ranks of a sequence|computation, ms|exchanged, GB|memory, GB",
            *(x.name for x in NETWORKS),
        )
    )
    sections = "\n".join(section(name, *size) for name, size in MODELS.items())
    muon_head = "|".join(("Model|Kind|gathered, GB", *(x.name for x in NETWORKS)))
    return f"""# From 8 to 4,096 GPUs

Written by `python -m bench.scaling --publish`. **Computed, not measured**: no GPU has run this.

- **Bytes** are those of the tensors that a rank gathers or reduces in a step with AdamW and one
  micro-step. The formulas give exactly the calls and bytes of runs with 2, 3 and 4 ranks on gloo,
  which a test intercepts as they pass PyTorch's dispatcher (on a CPU DDP's own calls pass it,
  too). FSDP pads the rows of each parameter to a multiple of the ranks: with more ranks than
  rows, padding is most of what is sent. Each further micro-step repeats FSDP's gathers.
- **FLOPs** are those of `fastgpt.metrics`: 6 for each weight of a matrix product, and causal
  attention.
- **Memory** is that between forward and backward: weights, gradients and AdamW's moments, and the
  weights that are still gathered (both are compared with counts of those runs), two more blocks
  in flight where weights are resharded, and what the forward keeps (`bench.memory`, by shapes,
  uncompiled). † is more than an H100's 80 GB. With fp32 gathers, autocast keeps a bf16 copy of
  every weight, which resharding does not free. With several micro-steps FSDP also holds whole
  gradients until the last one.
- **Network**: the time of all communication, the share of it that computation hides, and in bold
  the speed relative to GPUs that wait for nothing. A collective takes as long as a ring does: the
  bytes sent at {LINK:.0%} of the slowest link's rate, and the latencies of NCCL's own model
  (src/graph/tuning.cc, protocol Simple): {1e6 * START_S:g} us to start, {1e6 * OUTSIDE_S:g} us
  for a hop between machines, 3.4 us by NVLink and 5.7 us by PCIe inside. Short all-reduces take a
  tree's latency. Faster algorithms (NVLink SHARP, PAT) are not modelled.
- **Overlap**: DDP hides nothing, because a compiled backward hands over its gradients at its end.
  FSDP gathers the next block, and reduces the gradients of the last one, while a block computes;
  the first gather of each pass, what is outside of the blocks and the last reduction are exposed.
  This order is read from PyTorch's sources, because a CPU has no streams.
- **Computation** runs at {BUSY:.0%} of an H100's {PEAK / 1e12:.0f} TFLOP/s, dense bf16; the
  account of `gpt2-124m` in [performance.md](performance.md) has 51 %.
- A rank has the same number of tokens whatever the number of GPUs, so the batch grows with it.
  4,096 GPUs train `gpt2-124m` with {4096 * 64 * 1024:,} tokens a step, far more than is useful.
- `tp 8` is `--parallel.tp 8`: the GPUs of a machine compute each layer together, of as many
  sequences as all of them have in the other rows. Their sums of activations hide behind nothing.
  Memory is that of a model with a GPU's part of heads, features and vocabulary, and whole logits
  of that part; what enters and leaves a layer is on each of the GPUs, for all of the sequences.
  That is not compared with a run. It is left out where the heads do not divide.
- `fsdp` and `hsdp` gather weights in bf16 (`--parallel.dtype bf16`) where they do not say fp32;
  `no-reshard` is `--parallel.no-reshard`. hsdp's groups are machines of {MACHINE} GPUs; on one
  machine it is fsdp.

{markdown("Network|inside, GB/s a GPU|between machines, GB/s|what it is", nets)}

{sections}
## Long contexts

The {LONG} model with a context of {CONTEXT:,} on {RANKS[1]} GPUs with fsdp, one sequence for each
group of `--parallel.cp` ranks: a rank's computation; the keys and values that are gathered and
whose gradients are reduced; memory (what the forward keeps, divided by the ranks of a group, and
the keys and values of all layers); the time of these collectives, which attention waits for, and
in bold the speed relative to GPUs that wait for nothing.

{markdown(long_head, list(long_contexts()))}

## Recomputation

Memory of a rank in GB with fsdp on {RANKS[1]} GPUs and `--train.recompute` none, selective and
full, and in bold the speed relative to none, if nothing waits: full computes each block's forward a
second time, selective all of it but attention. In the backward the activations of one block come
on top.

{markdown("Model|none|selective|full", list(recomputed()))}

## Muon

What `--optim.kind muon` exchanges in a step on {RANKS[1]} GPUs besides the above, between backward
and the next forward, where nothing hides it: the updates, of which each rank computes a part, and
with shared weights each matrix before, which all ranks gather. Both are in bf16.

{markdown(muon_head, list(with_muon()))}
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaling:
    """Prints bytes, memory and time of training on 8 to 4,096 GPUs."""

    publish: bool = False
    """Write docs/scaling.md."""


def main(argv: list[str]) -> None:
    if flags.parse(Scaling, argv, prog="python -m bench.scaling").publish:
        PAGE.write_text(page(), encoding="utf-8")
        print(PAGE)
    else:
        print(page())


if __name__ == "__main__":
    run_command(main)
