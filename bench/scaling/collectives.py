"""Collective operations of a training step, by number, size and ranks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from fastgpt.config import OpsConfig, ParallelConfig
from fastgpt.lecture import build_model
from fastgpt.model_config import ModelConfig
from fastgpt.ops import select

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
