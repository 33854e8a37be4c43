"""Samples from datasets of `torch.utils.data`, in place of a corpus of tokens.

Each item is a pair (tokens, targets) of int64 tensors (context,). A target is the id that the model
should predict at its place, or -100 where the loss does not count.
"""

import hashlib
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fastgpt.data.tokenizers import Tokenizer
from fastgpt.errors import UserError

IGNORED = -100
"""Target of a position that does not count: the default `ignore_index` of PyTorch's losses."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """Datasets to train on in place of a text: `Trainer(config, data=Data(...))`.

    Args:
        train: map-style dataset, with `__len__` and `__getitem__`, of pairs (tokens, targets):
            int64 tensors (context,), targets -100 where the loss does not count.
        val: the same for validation.
        tokenizer: for samples and checkpoints; without one, ids are shown as numbers.
        vocab_size: number of ids, needed without a tokenizer.
        name: name in the run's header and manifest.
        template: chat template to save with the model.

    Raises:
        UserError: neither tokenizer nor vocabulary size is given.

    >>> tokens = torch.randint(50, (20, 17))
    >>> items = torch.utils.data.TensorDataset(tokens[:, :-1], tokens[:, 1:])
    >>> data = fastgpt.Data(train=items, val=items, vocab_size=50)
    """

    train: Dataset[tuple[Tensor, Tensor]]
    val: Dataset[tuple[Tensor, Tensor]]
    tokenizer: Tokenizer | None = None
    vocab_size: int | None = None
    name: str = "own data"
    template: str | None = None

    def __post_init__(self) -> None:
        if self.tokenizer is None and self.vocab_size is None:
            raise UserError("Data: vocab_size is missing: expected it, or a tokenizer")


class MapDataset:
    """Items of a dataset, each of which was checked and counted once."""

    def __init__(self, dataset: Dataset, context: int, vocab_size: int, name: str) -> None:
        self._dataset, self._shape = dataset, (context,)
        self._vocab_size, self._name = vocab_size, name
        self.size = len(cast(Any, dataset))
        if not self.size:
            raise UserError(f"{name} is empty: expected at least one item")
        self.counts = np.empty(self.size, np.int64)
        """Number of targets of each item."""
        digest = hashlib.sha256()
        for i in range(self.size):
            x, y = self[i]
            self.counts[i] = (y != IGNORED).sum()
            digest.update(x.tobytes() + y.tobytes())
            if not self.counts[i]:
                raise UserError(f"{name}, item {i}: no target counts, all are {IGNORED}")
        self.sha256 = digest.hexdigest()

    def __len__(self) -> int:
        """Returns the number of tokens."""
        return self.size * self._shape[0]

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns tokens and targets of an item, each (context,) int64.

        Raises:
            UserError: the item is something else, or an id is outside of the vocabulary.
        """
        item: Any = self._dataset[i]
        what = f"{self._name}, item {i}"
        if not (isinstance(item, tuple | list) and len(item) == 2):
            raise UserError(f"{what} is {type(item).__name__}: expected a pair (tokens, targets)")
        for name, x, least in zip(("tokens", "targets"), item, (0, IGNORED)):
            if not isinstance(x, Tensor) or x.shape != self._shape or x.dtype != torch.int64:
                found = f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
                raise UserError(f"{what}: {name} are {found}: expected {self._shape} torch.int64")
            fine = (x >= 0) & (x < self._vocab_size) | (x == least)
            if not fine.all():
                raise UserError(
                    f"{what}: {name} have the id {int(x[~fine][0])}: expected 0 to"
                    f" {self._vocab_size - 1}{', or -100' * (name == 'targets')}"
                )
        return item[0].numpy(), item[1].numpy()


@dataclass(frozen=True, kw_only=True)
class MapCorpus:
    """Items of both splits, with what the trainer asks of a corpus."""

    name: str
    train: MapDataset
    val: MapDataset
    tokenizer: Tokenizer
    sha256: str
    """Sha256 of all items."""
    python: None = None
    val_bytes_per_token: None = None

    def first_words(self) -> str:
        """Returns the text of the first tokens of validation."""
        return self.tokenizer.decode(self.val[0][0][:3])
