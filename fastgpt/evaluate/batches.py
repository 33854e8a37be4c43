"""Batches that an evaluation scores, shared out among the ranks."""

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fastgpt.config.config import Config
from fastgpt.data.corpus import Corpus
from fastgpt.data.dataset import DataSet
from fastgpt.data.items import IGNORED, ItemCorpus
from fastgpt.data.loader import EvalBatches, eval_batches, random_batches
from fastgpt.parallel.distributed import World


def validation_batches(
    config: Config,
    data: DataSet,
    corpus: Corpus | ItemCorpus,
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
    shared = {
        "context": context,
        "micro_batch": micro_batch,
        "rank": world.dp_rank,
        "world_size": world.dp_size,
    }
    if config.data.eval_batches:
        samples = config.data.eval_batches * config.global_batch
        seed = (config.seed & 0xFFFFFFFF, step, split == "train")
        return random_batches(tokens, samples=samples, seed=seed, **shared)
    documents = data.validation_documents(corpus, context)
    return eval_batches(
        tokens, max_tokens=max_tokens, documents=documents, pad_id=data.pad_id, **shared
    )


def as_many_on_all_ranks(batches: EvalBatches, world: World, shape: tuple[int, int]) -> EvalBatches:
    """Adds batches of `shape` without targets, so that all ranks have as many: a collective.

    Ranks that share weights gather them together, in each batch.
    """
    most = int(world.gather(torch.tensor([len(batches)])).max())
    x = torch.zeros(shape, dtype=torch.int64)
    empty = [(x, torch.full_like(x, IGNORED))] * (most - len(batches))
    return EvalBatches(itertools.chain(batches, empty), most)


def reported(
    batches: EvalBatches, report: Callable[[str], None]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the batches, and reports each before it is used."""
    for number, batch in enumerate(batches, start=1):
        report(f"evaluating {number}/{len(batches)}")
        yield batch
