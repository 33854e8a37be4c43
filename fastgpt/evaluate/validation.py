"""Loss of a model on held-out text, and the batches of it, shared out among the ranks."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from fastgpt.config.config import Config
from fastgpt.data.corpus import Corpus
from fastgpt.data.dataset import Dataset
from fastgpt.data.items import IGNORED, MapCorpus
from fastgpt.data.loader import EvalBatches, eval_batches, random_batches
from fastgpt.device.device import kind_of
from fastgpt.parallel.distributed import World
from fastgpt.parallel.signals import Stopped, StopSignal, SyncedStop


@torch.no_grad()
def mean_loss(
    model: Callable[[Tensor, Tensor], Tensor],
    batches: EvalBatches | list[tuple[Tensor, Tensor]],
    *,
    world: World,
    device: str,
    autocast: AbstractContextManager,
    stop: StopSignal | SyncedStop | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> tuple[float, int]:
    """Computes the mean loss in nats over the targets of all ranks, and counts the targets.

    Args:
        model: (tokens, targets) -> mean loss, in evaluation mode.
        batches: this rank's (tokens, targets), with the shape of training batches, so that nothing
            recompiles.
        autocast: context of each forward pass.
        stop: checked before each batch.
        report: called before each batch with the progress.

    Raises:
        Stopped: on all ranks, if one was asked to stop before its last batch.
    """
    # without fp64 on the device they are on the CPU, at the price of a sync for each batch
    held, pins = device if kind_of(device).has_fp64 else "cpu", kind_of(device).pins
    totals, seen = torch.zeros(3, dtype=torch.float64, device=held), 0
    for number, (x, y) in enumerate(batches, start=1):
        report(f"evaluating {number}/{len(batches)}")
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
    return total / count, int(count) // world.model_parallel_size


def perplexity(loss: float) -> float:
    """Returns exp(loss), infinite where that overflows."""
    return math.exp(loss) if loss < 700 else math.inf


def validation_batches(
    config: Config,
    data: Dataset,
    corpus: Corpus | MapCorpus,
    split: str,
    *,
    max_tokens: int,
    step: int,
    micro_batch: int,
    world: World,
) -> EvalBatches:
    """Makes this rank's batches of a corpus: fixed ones, or random ones if the settings say so.

    Args:
        split: `val` or `train`.
        max_tokens: approximate number of targets in fixed batches over all ranks; 0: all.
        step: the random batches are others at each step.
    """
    tokens, context = getattr(corpus, split), config.model.context
    shared = {"context": context, "micro_batch": micro_batch}
    shared |= {"rank": world.dp_rank, "world_size": world.dp_size}
    if config.data.eval_batches:
        samples = config.data.eval_batches * config.global_batch
        seed = (config.seed & 0xFFFFFFFF, step, split == "train")
        return random_batches(tokens, samples=samples, seed=seed, **shared)
    documents = None
    if config.data.align == "document" and isinstance(corpus, Corpus):
        documents = data.order(corpus, "val", context, 0)
    return eval_batches(
        tokens, max_tokens=max_tokens, documents=documents, pad_id=data.pad_id, **shared
    )
