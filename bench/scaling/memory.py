"""Memory of a rank in a training step."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch

from bench import memory
from bench.scaling.collectives import BYTES, Plan, Unit, padded
from fastgpt.config import Recompute
from fastgpt.model_config import ModelConfig


def state_bytes(parts: Sequence[Unit], plan: Plan, ranks: int) -> int:
    """Counts the bytes of a rank's weights, gradients and AdamW's two moments, in fp32."""
    shards = plan.shards(ranks)
    return 16 * sum(padded(unit, shards) for unit in parts) // shards


def gathered_bytes(parts: Sequence[Unit], plan: Plan) -> int:
    """Counts the bytes of the whole weights that a rank still has after the forward."""
    if plan.parallel.kind == "ddp":
        return 0
    units = parts[:1] if plan.parallel.reshard else parts
    return BYTES[plan.parallel.dtype] * sum(padded(unit, 1) for unit in units)


@cache
def kept_bytes(
    config: ModelConfig,
    sequences: int,
    *,
    narrow: bool,
    tp: int = 1,
    recompute: Recompute = "none",
) -> int:
    """Counts what the forward keeps for the backward, with copies of fp32 weights in bf16.

    Args:
        tp: number of tensor-parallel ranks, of which each keeps what a model with its part of the
            heads, of the feed-forward width and of the vocabulary does, and whole logits of that.
    """
    dtype = torch.bfloat16 if narrow else torch.float32
    loss = "chunked" if tp == 1 else "torch"
    own = replace(
        config, num_heads=config.num_heads // tp, num_kv_heads=config.kv_heads // tp,
        head_size=config.head_dim, ffn_dim=config.ffn_width // tp,
        vocab_size=config.padded_vocab // tp, vocab_multiple=1,
    )  # fmt: skip
    one, two = (
        memory.account(replace(own, num_layers=n), sequences, loss, dtype, recompute=recompute).kept
        for n in (1, 2)
    )
    return one + (config.num_layers - 1) * (two - one)


def memory_bytes(parts: Sequence[Unit], plan: Plan, ranks: int, kept: int) -> int:
    """Counts a rank's bytes between forward and backward, with two more blocks where reshard is."""
    ahead = 0
    if plan.parallel.kind != "ddp" and plan.parallel.reshard:  # one in use, and the next one
        ahead = 2 * BYTES[plan.parallel.dtype] * padded(parts[1], 1)
    return state_bytes(parts, plan, ranks) + gathered_bytes(parts, plan) + ahead + kept
