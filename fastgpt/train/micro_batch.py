"""Choice of a micro-batch that fits into the GPU's memory, by a rehearsal before the first step."""

import gc
from collections.abc import Callable
from contextlib import suppress

import torch

from fastgpt.config.config import Config
from fastgpt.errors import UserError
from fastgpt.parallel.distributed import World
from fastgpt.train.init_from import Warn

REHEARSED = {"cuda"}
"""Types of device with memory of their own, which a step may use up."""


def largest_micro_batch(config: Config, world: World, warn: Warn) -> int:
    """Returns the largest size up to `train.micro_batch` that divides a rank's sequences."""
    ranks = world.dp_size
    if config.global_batch % ranks:
        of = (
            f" that read data, {world.model_parallel_size} together"
            if world.model_parallel_size > 1
            else ""
        )
        raise UserError(
            f"--train.batch-tokens is {config.train.batch_tokens}: {config.global_batch} "
            f"sequences of {config.model.context}, expected a multiple of the {ranks} ranks{of}"
        )
    share = config.global_batch // ranks
    most = min(share, config.train.micro_batch)
    size = next(size for size in range(most, 0, -1) if share % size == 0)
    if 2 * size <= most:
        warn(
            f"{share} sequences per rank divide into micro-batches of {size} at "
            f"most (--train.micro-batch is {config.train.micro_batch}): another "
            "--train.batch-tokens would be faster"
        )
    return size


def fitting(most: int, share: int, runs: Callable[[int], None], warn: Warn) -> int:
    """Returns the first size for which `runs` does not raise torch.OutOfMemoryError.

    It tries `most`, then each time the largest divisor up to half of the one before of `share`, the
    number of sequences of a global batch. If not even one sequence fits, that is a `UserError`.
    """
    size = most
    while True:
        with suppress(torch.OutOfMemoryError):
            runs(size)
            break
        gc.collect()  # no longer in the handler, where the error holds the tensors of its frames
        torch.cuda.empty_cache()
        if size == 1:
            raise UserError(
                "no GPU memory left for a step with a micro-batch of 1: end other programs on the"
                " GPU (nvidia-smi shows them), or train a smaller model or with a smaller"
                " --model.context"
            )
        size = next(n for n in range(size // 2, 0, -1) if share % n == 0)
    if size != most:
        warn(
            f"--train.micro-batch is {most}, for which the GPU's memory is too small: using {size},"
            f" {share // size} at a time for the same batch (gradient accumulation)"
        )
    return size
