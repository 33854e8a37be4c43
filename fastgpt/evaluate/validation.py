"""Evaluation of a model: its loss on held-out text."""

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from fastgpt.data.loader import IGNORED
from fastgpt.device.device import kind_of
from fastgpt.parallel.distributed import World
from fastgpt.parallel.signals import Stopped, StopSignal, SyncedStop


@torch.no_grad()
def mean_loss(
    model: Callable[[Tensor, Tensor], Tensor],
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    world: World,
    device: str,
    autocast: AbstractContextManager,
    stop: StopSignal | SyncedStop | None = None,
) -> tuple[float, int]:
    """Computes the mean loss in nats over the targets of all ranks, and counts the targets.

    Args:
        model: (tokens, targets) -> mean loss, in evaluation mode.
        batches: this rank's (tokens, targets), with the shape of training batches, so that nothing
            recompiles.
        autocast: context of each forward pass.
        stop: checked before each batch.

    Raises:
        Stopped: on all ranks, if one was asked to stop before its last batch.
    """
    # without fp64 on the device they are on the CPU, at the price of a sync for each batch
    held, pins = device if kind_of(device).has_fp64 else "cpu", kind_of(device).pins
    totals, seen = torch.zeros(3, dtype=torch.float64, device=held), 0
    for x, y in batches:
        if stop is not None and stop.received:
            totals[2] = 1
            break
        count = int((y != IGNORED).sum())
        if pins:  # as a copy from other memory would wait for the batch before
            x, y = x.pin_memory(), y.pin_memory()
        with autocast:
            loss = model(x.to(device, non_blocking=pins), y.to(device, non_blocking=pins))
        if not count:  # of a rank that has fewer batches, but must take part
            continue
        totals[0] += loss.to(held).double() * count
        seen += count
    totals[1].fill_(seen)
    total, count, stopped = world.sum(totals).tolist()
    if stopped:
        raise Stopped
    return total / count, int(count) // world.non_dp_size


def perplexity(loss: float) -> float:
    """Returns exp(loss), infinite where that overflows."""
    return math.exp(loss) if loss < 700 else math.inf
