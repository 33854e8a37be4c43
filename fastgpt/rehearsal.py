"""Choice of a micro-batch that fits into the GPU's memory, by a rehearsal before the first step."""

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from fastgpt.distributed import World
from fastgpt.errors import UserError

REHEARSED = {"cuda"}
"""Types of device with memory of their own, which a step may use up."""


def fitting(
    most: int, share: int, runs: Callable[[int], None], world: World, warn: Callable[[str], None]
) -> int:
    """Returns the largest size up to `most` at which `runs` does not run out of memory on any rank.

    Each size tried is the largest divisor of `share` up to half of the one before.

    Args:
        share: sequences of a rank in a global batch.
        runs: takes a micro-batch, and raises torch.OutOfMemoryError if that is too large.
        warn: called with one line if `most` is too large.

    Raises:
        UserError: not even one sequence fits.
    """
    size = most
    while _any_rank_fails(size, runs, world):
        if size == 1:
            raise UserError(
                "no GPU memory left for a step with a micro-batch of 1: expected a smaller model, a"
                " smaller --model.context or a GPU with more memory"
            )
        size = next(n for n in range(size // 2, 0, -1) if share % n == 0)
    if size != most:
        warn(
            f"--train.micro-batch is {most}, for which the GPU's memory is too small: using {size},"
            f" {share // size} at a time for the same batch (gradient accumulation)"
        )
    return size


def _any_rank_fails(size: int, runs: Callable[[int], None], world: World) -> bool:
    failed = False
    try:
        runs(size)
    except torch.OutOfMemoryError:
        failed = True
    if failed:  # not in the handler, where the error still holds the tensors of its frames
        gc.collect()
        torch.cuda.empty_cache()
    return bool(world.sum(torch.tensor(int(failed))))


def rehearse(
    loss: Callable[[Tensor, Tensor], Tensor],
    tokens: Tensor,
    autocast: AbstractContextManager,
    state_bytes: int,
) -> None:
    """Runs two micro-steps on `tokens`, beside a buffer as large as the optimizers' state will be.

    The second one has the gradients of the first in memory, as with accumulation.
    """
    state = torch.empty(state_bytes, dtype=torch.uint8, device=tokens.device)
    for _ in range(2):
        with autocast:
            value = loss(tokens, tokens)
        value.backward()
    del state
