"""Collective operations of a training step, by number, size and ranks."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from fastgpt.config import OpsConfig, ParallelConfig
from fastgpt.lecture import build_model
from fastgpt.model_config import ModelConfig
from fastgpt.muon import MOST
from fastgpt.ops import select
from fastgpt.tensor_parallel import SPLIT

MACHINE = 8
"""GPUs of a machine."""
BYTES = {"fp32": 4, "bf16": 2}


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

    def shards(self, ranks: int) -> int:
        """Returns the number of ranks that share out what one tensor-parallel rank has."""
        return self.group(ranks) // self.parallel.tp


@dataclass(frozen=True, slots=True)
class Work:
    """Computation of one step by the ranks that read the same data."""

    config: ModelConfig
    sequences: int
    """Number of sequences in a micro-step."""
    micro_steps: int = 1
    dtype: str = "bf16"
    """Number format of keys, values and what blocks return."""

    @property
    def keys_bytes(self) -> int:
        """Bytes of the keys and values of whole sequences in one layer."""
        width = 2 * self.config.kv_heads * self.config.head_dim
        return BYTES[self.dtype] * self.sequences * self.config.context * width


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


@cache
def units(config: ModelConfig, tp: int = 1) -> list[Unit]:
    """Returns the parameters' shapes: of those outside of the blocks, then of each block.

    Args:
        tp: number of tensor-parallel ranks; the shapes are those of one of them.
    """
    with torch.device("meta"):
        model = build_model(config, select(OpsConfig(), "cpu", compiled=False))
    found: list[Unit] = [[] for _ in range(1 + config.num_layers)]
    for name, weight in model.named_parameters():
        shape, place = list(weight.shape), name.split(".")
        cut = SPLIT.get(".".join(place[-2:]))
        if cut is not None:
            shape[cut] //= tp
        found[1 + int(place[1]) if place[0] == "h" else 0].append(torch.Size(shape))
    return found


def padded(unit: Unit, ranks: int) -> int:
    """Counts a unit's elements with each parameter's rows padded to a multiple of the ranks."""
    return sum(-(-shape[0] // ranks) * ranks * shape[1:].numel() for shape in unit)


def exchange(
    parts: Sequence[Unit], plan: Plan, ranks: int, work: Work
) -> Iterator[tuple[str, Collective]]:
    """Yields the collectives of a step with AdamW, and where each of them is.

    That is: root, block, context (keys and values), layer (activations), or step (one for all).

    Args:
        parts: from `units`.
    """
    parallel, size = plan.parallel, BYTES[plan.gradients]
    meets = parallel.kind != "ddp" or parallel.cp > 1  # in each forward
    checks = max(1, work.micro_steps - 1) if meets else 1
    yield "step", Collective("all_reduce", 8, ranks, times=checks)  # was any rank asked to stop?
    yield "step", Collective("all_reduce", 4, ranks)  # the loss
    layers = len(parts) - 1
    if parallel.cp > 1:
        for op in ("all_gather", "reduce_scatter"):
            times = layers * work.micro_steps
            own = work.keys_bytes // parallel.tp
            yield "context", Collective(op, own, parallel.cp, parallel.tp, times)
    if parallel.kind == "ddp":
        yield "root", Collective("all_reduce", size * sum(padded(x, 1) for x in parts), ranks)
        return
    shards, weights = plan.shards(ranks), sum(map(len, parts))
    norms = Collective("all_reduce", 4 * weights, shards, parallel.tp)
    yield "step", norms
    if parallel.tp > 1:
        yield "step", replace(norms, ranks=parallel.tp, stride=1)
        yield from (("layer", x) for x in _of_layers(work, parallel, layers))
    if shards > 1:
        yield from _of_weights(parts, plan, ranks, work.micro_steps)


def _of_weights(
    parts: Sequence[Unit], plan: Plan, ranks: int, micro_steps: int
) -> Iterator[tuple[str, Collective]]:
    """Yields the collectives by which FSDP gathers weights and shares out their gradients."""
    parallel, size, shards = plan.parallel, BYTES[plan.gradients], plan.shards(ranks)
    group = plan.group(ranks)
    for where, unit, count in (("root", parts[0], 1), ("block", parts[1], len(parts) - 1)):
        numbers, copies = padded(unit, shards), ranks // group
        passes = 2 if where == "block" and parallel.reshard else 1
        gathers, gathered = count * passes * micro_steps, BYTES[parallel.dtype] * numbers
        yield where, Collective("all_gather", gathered, shards, parallel.tp, gathers)
        yield where, Collective("reduce_scatter", size * numbers, shards, parallel.tp, count)
        if copies > 1:
            yield where, Collective("all_reduce", size * numbers // shards, copies, group, count)


def _of_layers(work: Work, parallel: ParallelConfig, layers: int) -> Iterator[Collective]:
    """Yields the collectives by which tensor-parallel ranks join what each computes of a layer.

    Blocks sum two tensors in the forward and two in the backward, the embedding one in the forward,
    and the head one in the backward. The loss joins the log-sum-exp of each part of the vocabulary,
    and sums the logits of the targets.
    """
    tokens, tp = work.sequences * work.config.context // parallel.cp, parallel.tp
    size = BYTES[work.dtype] * tokens * work.config.dim
    yield Collective("all_reduce", size, tp, times=(4 * layers + 2) * work.micro_steps)
    yield Collective("all_gather", 4 * tokens * tp, tp, times=work.micro_steps)
    yield Collective("all_reduce", 4 * tokens, tp, times=work.micro_steps)


def of_muon(
    parts: Sequence[Unit], plan: Plan, ranks: int, most: int = MOST
) -> Iterator[Collective]:
    """Yields the collectives that a step with Muon has besides those with AdamW, all in bf16.

    Each rank computes the updates of a part of the matrices of one shape, which all gather. Of
    weights that are shared out, all ranks gather each matrix before.

    Args:
        most: numbers that a rank takes at once.
    """
    matrices = Counter(shape for unit in parts[1:] for shape in unit if len(shape) == 2)
    for shape, count in matrices.items():
        together = ranks * max(1, most // shape.numel())
        for first in range(0, count, together):
            share = -(-min(together, count - first) // ranks)
            yield Collective("all_gather", 2 * share * ranks * shape.numel(), ranks)
        if plan.parallel.kind != "ddp":
            group = plan.group(ranks)
            yield Collective("all_gather", 2 * padded([shape], group), group, times=count)
