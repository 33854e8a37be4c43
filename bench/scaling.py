"""Account of training on many GPUs: `python -m bench.scaling [--publish]`.

Counts the bytes that a step exchanges, its FLOPs and the memory of a rank for each kind of parallel
training, and estimates how much of the communication the computation hides. The formulas of bytes
and of memory are compared with counts of small runs in `tests/bench/test_scaling.py`.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from bench import memory
from bench.account.__main__ import markdown
from bench.account.time import GPUS
from bench.report import DOCS
from fastgpt import flags
from fastgpt.config import OpsConfig, ParallelConfig
from fastgpt.errors import run_command
from fastgpt.lecture import build_model
from fastgpt.metrics import flops_per_token
from fastgpt.model_config import ModelConfig
from fastgpt.ops import select
from fastgpt.recipes import RECIPES

PAGE = DOCS / "scaling.md"
MACHINE = 8
"""GPUs of a machine."""
RANKS = (8, 64, 512, 4096)
PEAK = next(gpu.flops for gpu in GPUS if gpu.name == "H100")
ROOM = 80e9
"""Bytes of the GPU's memory."""
BUSY = 0.5
"""Share of the peak FLOPs that a step reaches without communication."""
LINK = 0.8
"""Share of a link's rate that collectives reach."""
START_S, OUTSIDE_S, TREE_S = 8.4e-6, 14e-6, 4e-6
"""Seconds of a collective's start, of a hop between machines, and of one inside in a tree."""
BYTES = {"fp32": 4, "bf16": 2}


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


@dataclass(frozen=True, slots=True)
class Plan:
    """A kind of parallel training, and the number format in which gradients are exchanged."""

    parallel: ParallelConfig
    gradients: str = "fp32"

    def group(self, ranks: int) -> int:
        """Returns the number of ranks that hold the model together; hsdp: those of a machine."""
        shards = {"ddp": 1, "fsdp": ranks, "hsdp": self.parallel.shards or MACHINE}
        return shards[self.parallel.kind]

    @property
    def narrow(self) -> bool:
        """Whether the weights that are computed with are gathered in bf16."""
        return self.parallel.kind != "ddp" and self.parallel.dtype == "bf16"


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
}


# --- bytes ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective operation, done `times` times in a step."""

    op: str
    """all_gather, reduce_scatter or all_reduce."""
    bytes: int
    """Size of the tensor that is gathered or reduced."""
    ranks: int
    stride: int = 1
    """Distance of the group's ranks."""
    times: int = 1

    @property
    def sent(self) -> float:
        """Bytes that each rank sends each time, with rings."""
        share = self.bytes * (self.ranks - 1) / self.ranks
        return 2 * share if self.op == "all_reduce" else share


Unit = list[torch.Size]
"""Shapes of the parameters that FSDP gathers together."""


def units(config: ModelConfig) -> list[Unit]:
    """Returns the parameters' shapes: of those outside of the blocks, then of each block."""
    with torch.device("meta"):
        model = build_model(config, select(OpsConfig(), "cpu", compiled=False))
    blocks = [list(block.parameters()) for block in model.h]
    inside = {id(weight) for block in blocks for weight in block}
    root = [weight for weight in model.parameters() if id(weight) not in inside]
    return [[weight.shape for weight in unit] for unit in (root, *blocks)]


def padded(unit: Unit, ranks: int) -> int:
    """Counts a unit's elements with each parameter's rows padded to a multiple of the ranks."""
    return sum(-(-shape[0] // ranks) * ranks * shape[1:].numel() for shape in unit)


def keys_bytes(config: ModelConfig, sequences: int, dtype: str) -> int:
    """Counts the bytes of the keys and values of whole sequences in one layer."""
    width = 2 * config.kv_heads * config.head_dim
    return BYTES[dtype] * sequences * config.context * width


def exchange(
    parts: Sequence[Unit], plan: Plan, ranks: int, micro_steps: int = 1, keys: int = 0
) -> Iterator[tuple[str, Collective]]:
    """Yields the collectives of a step with AdamW: (root, block, context or step, one for all).

    Args:
        keys: see `keys_bytes`; for a micro-batch, with context parallelism.
    """
    parallel, size = plan.parallel, BYTES[plan.gradients]
    meets = parallel.kind != "ddp" or parallel.cp > 1  # in each forward
    checks = max(1, micro_steps - 1) if meets else 1
    yield "step", Collective("all_reduce", 8, ranks, times=checks)  # was any rank asked to stop?
    yield "step", Collective("all_reduce", 4, ranks)  # the loss
    if parallel.cp > 1:
        for op in ("all_gather", "reduce_scatter"):
            times = (len(parts) - 1) * micro_steps
            yield "context", Collective(op, keys, parallel.cp, times=times)
    if parallel.kind == "ddp":
        yield "root", Collective("all_reduce", size * sum(padded(x, 1) for x in parts), ranks)
        return
    group = plan.group(ranks)
    copies, weights = ranks // group, sum(map(len, parts))
    yield "step", Collective("all_reduce", 4 * weights, group)  # norms of the gradients
    for where, unit, count in (("root", parts[0], 1), ("block", parts[1], len(parts) - 1)):
        numbers = padded(unit, group)
        passes = 2 if where == "block" and parallel.reshard else 1
        gathers, gathered = count * passes * micro_steps, BYTES[parallel.dtype] * numbers
        yield where, Collective("all_gather", gathered, group, times=gathers)
        yield where, Collective("reduce_scatter", size * numbers, group, times=count)
        if copies > 1:
            yield where, Collective("all_reduce", size * numbers // group, copies, group, count)


# --- memory ---------------------------------------------------------------------------------------


def state_bytes(parts: Sequence[Unit], plan: Plan, ranks: int) -> int:
    """Counts the bytes of a rank's weights, gradients and AdamW's two moments, in fp32."""
    group = plan.group(ranks)
    return 16 * sum(padded(unit, group) for unit in parts) // group


def gathered_bytes(parts: Sequence[Unit], plan: Plan) -> int:
    """Counts the bytes of the whole weights that a rank still has after the forward."""
    if plan.parallel.kind == "ddp":
        return 0
    units = parts[:1] if plan.parallel.reshard else parts
    return BYTES[plan.parallel.dtype] * sum(padded(unit, 1) for unit in units)


def kept_bytes(config: ModelConfig, sequences: int, *, narrow: bool) -> int:
    """Counts what the forward keeps for the backward, with copies of fp32 weights in bf16."""
    dtype = torch.bfloat16 if narrow else torch.float32
    one, two = (
        memory.account(replace(config, num_layers=n), sequences, "chunked", dtype).kept
        for n in (1, 2)
    )
    return one + (config.num_layers - 1) * (two - one)


def memory_bytes(parts: Sequence[Unit], plan: Plan, ranks: int, kept: int) -> int:
    """Counts a rank's bytes between forward and backward, with two more blocks where reshard is."""
    ahead = 0
    if plan.parallel.kind != "ddp" and plan.parallel.reshard:  # one in use, and the next one
        ahead = 2 * BYTES[plan.parallel.dtype] * padded(parts[1], 1)
    return state_bytes(parts, plan, ranks) + gathered_bytes(parts, plan) + ahead + kept


# --- time -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Network:
    """Links of machines with 8 GPUs: bytes per second and direction."""

    name: str
    inside: float
    """Rate from a GPU to the others of its machine."""
    port: float
    """Rate of a port to other machines."""
    ports: int
    """Ports of a machine."""
    hop_s: float
    """Seconds of a ring's hop inside of a machine."""
    source: str


NETWORKS = (
    Network("NVLink, InfiniBand", 450e9, 50e9, 8, 3.4e-6,
            "H100 SXM (900 GB/s of NVLink in both directions together), 400 Gb/s for each GPU"),
    Network("NVLink, RoCE", 450e9, 12.5e9, 8, 3.4e-6,
            "the same machine with 100 Gb/s Ethernet for each GPU"),
    Network("PCIe, Ethernet", 64e9, 12.5e9, 1, 5.7e-6,
            "the same GPU behind PCIe 5.0 x16, with 100 Gb/s for each machine"),
)  # fmt: skip


def seconds(x: Collective, net: Network) -> float:
    """Returns the time of one collective by a ring, or with a tree's latency."""
    local = max(1, min(x.ranks, MACHINE // x.stride))
    machines, rounds = x.ranks // local, 2 if x.op == "all_reduce" else 1
    rate = net.inside
    if machines > 1:  # the other groups of these machines send at the same time
        rate = min(rate, net.ports * net.port * local / MACHINE)
    latency = rounds * ((machines - 1) * OUTSIDE_S + (x.ranks - machines) * net.hop_s)
    if x.op == "all_reduce":
        latency = min(latency, 2 * ((local - 1) * TREE_S + math.log2(machines) * OUTSIDE_S))
    return START_S + latency + x.sent / (LINK * rate)


def exposed_seconds(
    found: Sequence[tuple[str, Collective]], plan: Plan, layers: int, block_s: float, net: Network
) -> float:
    """Returns the communication of a step during which nothing is computed.

    Args:
        found: from `exchange`.
        block_s: seconds of a block's forward; its backward takes twice as long.
    """
    if plan.parallel.kind == "ddp":  # torch.compile hands over all gradients after the backward
        return sum(seconds(x, net) for _, x in found)
    gather = sum(seconds(x, net) for at, x in found if (at, x.op) == ("block", "all_gather"))
    reduce = sum(seconds(x, net) for at, x in found if at == "block" and x.op != "all_gather")
    once = sum(seconds(x, net) for at, x in found if at != "block")
    again = gather if plan.parallel.reshard else 0.0
    # the first gather of each pass and the last block's reduction have nothing to hide behind
    forward = gather + (layers - 1) * max(0.0, gather - block_s)
    backward = again + (layers - 1) * max(0.0, again + reduce - 2 * block_s) + reduce
    return once + forward + backward


def compute_seconds(config: ModelConfig, tokens: int) -> tuple[float, float]:
    """Returns the seconds of a step's computation, and of one block's forward."""
    rate = BUSY * PEAK
    total = flops_per_token(config)
    head = 6 * config.padded_vocab * config.dim
    return tokens * total / rate, tokens * (total - head) / 3 / config.num_layers / rate


# --- the page -------------------------------------------------------------------------------------


def long_contexts() -> Iterator[tuple[str, ...]]:
    """Yields a row for each number of ranks that share a long sequence."""
    config = replace(MODELS[LONG][0], context=CONTEXT)
    parts, kept = units(config), kept_bytes(config, 1, narrow=True)
    keys, ranks = keys_bytes(config, 1, "bf16"), RANKS[1]
    for cp in (1, 2, 4, 8):
        plan = _fsdp(cp=cp)
        own = kept // cp + (config.num_layers * keys if cp > 1 else 0)
        needed = memory_bytes(parts, plan, ranks, own)
        found = list(exchange(parts, plan, ranks, keys=keys))
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
    parts, tokens = units(config), sequences * config.context
    kept = {x: kept_bytes(config, sequences, narrow=x) for x in (False, True)}
    whole, block = compute_seconds(config, tokens)
    for name, plan in PLANS.items():
        for ranks in RANKS:
            if plan.parallel.kind == "hsdp" and ranks == MACHINE:
                continue  # fsdp
            found = list(exchange(parts, plan, ranks))
            sizes = [
                sum(x.bytes * x.times for _, x in found if x.op == op) / 1e9
                for op in ("all_gather", "reduce_scatter", "all_reduce")
            ]
            needed = memory_bytes(parts, plan, ranks, kept[plan.narrow])
            cells = []
            for net in NETWORKS:
                every = sum(x.times * seconds(x, net) for _, x in found)
                exposed = exposed_seconds(found, plan, config.num_layers, block, net)
                hidden, share = 1 - exposed / every, whole / (whole + exposed)
                cells.append(f"{1e3 * every:,.0f} ms, {hidden:.0%}, **{share:.0%}**")
            fits = "" if needed <= ROOM else " †"
            figures = [f"{x:.2f}" if x >= 0.005 else "-" for x in sizes]
            yield name, f"{ranks:,}", *figures, f"{needed / 1e9:,.1f}{fits}", *cells


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
