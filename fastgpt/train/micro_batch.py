"""Choice of a micro-batch that fits into the GPU's memory, by a rehearsal before the first step."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta

import torch
from torch import Tensor

from fastgpt.config.config import Config
from fastgpt.errors import UserError
from fastgpt.model.flops import matrix_weights
from fastgpt.parallel.distributed import World, collectives_begun
from fastgpt.train.init_from import Warn

REHEARSED = {"cuda"}
"""Types of device with memory of their own, which a step may use up."""
OUTSIDE = 3 * 2**29
"""Bytes of a GPU that the rehearsal of several ranks leaves free, a sixteenth of it at most: NCCL
and CUDA allocate memory besides PyTorch's, and fail without an OutOfMemoryError."""
ALONE_S = 300.0
"""Seconds that a rank without memory waits for the others, which may wait for it in the middle of a
step, or still compile."""


def largest_micro_batch(config: Config, world: World, warn: Warn) -> int:
    """Returns the largest size up to `train.micro_batch` that divides a rank's sequences.

    Raises:
        UserError: the batch does not divide among the ranks.
    """
    ranks = world.dp_size
    if config.global_batch % ranks:
        of = f" that read data, {world.non_dp_size} together" if world.non_dp_size > 1 else ""
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


def fitting(most: int, share: int, runs: Callable[[int], None], world: World, warn: Warn) -> int:
    """Returns the first size that fits into the memory of every rank.

    It tries `most`, then each time the largest divisor of `share` up to half of the one before.

    Args:
        share: sequences of a rank in a global batch.
        runs: takes a micro-batch, and raises torch.OutOfMemoryError if that is too large.

    Raises:
        UserError: not even one sequence fits; or ranks ran out of memory at different places, after
            which their collective operations do not match.
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
    group = world.patient_group()  # the other groups of a rank that failed may be behind
    failed, begun = False, collectives_begun()
    try:
        runs(size)
    except torch.OutOfMemoryError:
        failed = True
    own = failed, collectives_begun() - begun
    if failed:  # not in the handler, where the error still holds the tensors of its frames
        gc.collect()
        torch.cuda.empty_cache()
        if group is not None:
            backend = group._get_backend(torch.device("cpu"))
            backend._set_default_timeout(timedelta(seconds=ALONE_S))
    try:
        found = world.all_gather_object(own, group)
    except RuntimeError:  # a rank waits for this one
        found = [own, (False, -1)]
    failed = any(ran_out for ran_out, _ in found)
    if failed and len({number for _, number in found}) > 1:
        raise UserError(
            f"no GPU memory left on some ranks with micro-batches of {size}, in the middle of a"
            " step in which the others wait for them: pass a smaller --train.micro-batch (same"
            " batch size), or end other programs on their GPUs"
        )
    return failed


@contextmanager
def equal_memory(device: str, world: World, exchanged: int) -> Iterator[None]:
    """Context in which all ranks can allocate equally much, so that they run out of it together.

    Args:
        exchanged: bytes that ranks exchange at a time; they do once before, for which NCCL
            allocates its buffers.
    """
    if world.size == 1 or device != "cuda":
        yield
        return
    world.sum(torch.zeros(exchanged, dtype=torch.uint8, device=device))
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    least = max(0, min(world.all_gather_object(free - min(OUTSIDE, total // 16))))
    share = (torch.cuda.memory_reserved() + least) / total
    torch.cuda.set_per_process_memory_fraction(share)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def rehearse(
    loss: Callable[[Tensor, Tensor], Tensor],
    tokens: Tensor,
    autocast: AbstractContextManager,
    state_bytes: int,
    micro_steps: Sequence[AbstractContextManager],
) -> None:
    """Runs a micro-step on `tokens` in each context, beside a buffer as large as optimizer state.

    A later one has the gradients of those before in memory, as with accumulation.
    """
    state = torch.empty(state_bytes, dtype=torch.uint8, device=tokens.device)
    for micro_step in micro_steps:
        with micro_step:
            with autocast:
                value = loss(tokens, tokens)
            value.backward()
    del state


def least_bytes(config: Config) -> int:
    """Counts the bytes of matrix weights, their gradients and their optimizer state, in fp32."""
    return 4 * {"adamw": 4, "muon": 3}[config.optim.kind] * matrix_weights(config.model)
