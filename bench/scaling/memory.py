"""Memory of a rank in a training step."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from bench import memory
from bench.scaling.collectives import BYTES, Plan, Unit, padded
from fastgpt.model_config import ModelConfig


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
