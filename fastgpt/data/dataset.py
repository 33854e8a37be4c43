"""Dataset of a run: one corpus, or several mixed by weight, and the sampling from them."""

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fastgpt.config.config import DataConfig
from fastgpt.data.corpus import Corpus
from fastgpt.data.items import Data, MapCorpus, MapDataset
from fastgpt.data.order import SampleOrder
from fastgpt.data.preparation import Report, open_corpus
from fastgpt.data.tokenizers import IdTokenizer, Tokenizer, same_tokenizer
from fastgpt.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class Dataset:
    """Corpora with a common tokenizer, their weights, and the settings of sampling."""

    corpora: tuple[Corpus, ...] | tuple[MapCorpus]
    weights: tuple[float, ...]
    """Weight of each corpus; they sum to 1."""
    config: DataConfig
    template: str | None = None
    """Chat template to save with the model."""

    @property
    def tokenizer(self) -> Tokenizer:
        return self.corpora[0].tokenizer

    @property
    def pad_id(self) -> int:
        """Id of padding, which never counts in the loss: the end-of-text token's, or 0."""
        return self.tokenizer.eot_id or 0

    @property
    def name(self) -> str:
        """Name of the corpus; of several, their names and weights."""
        if len(self.corpora) == 1:
            return self.corpora[0].name
        return " + ".join(f"{w:.3g} {c.name}" for c, w in zip(self.corpora, self.weights))

    @property
    def sha256(self) -> str:
        """Sha256 of the corpus's text; of several, a hash of theirs and the weights."""
        if len(self.corpora) == 1:
            return self.corpora[0].sha256
        return _hash_of([corpus.sha256 for corpus in self.corpora], self.weights)

    @property
    def fingerprint(self) -> str:
        """Sha256 of all tokens and the mixture's weights, which decide the order of reading."""
        if isinstance(self.corpora[0], MapCorpus):
            return self.sha256  # as earlier checkpoints have it
        return _hash_of(
            [x.fingerprint for x in self.corpora if isinstance(x, Corpus)], self.weights
        )

    @property
    def val_bytes_per_token(self) -> float | None:
        """Mean bytes per validation token, for bits per byte; None if not every byte is scored."""
        every_byte = len(self.corpora) == 1 and self.config.align != "document"
        return self.corpora[0].val_bytes_per_token if every_byte else None

    def orders(self, context: int, seed: int) -> list[SampleOrder]:
        """Returns the order of samples in the training tokens of each corpus.

        Raises:
            UserError: a corpus is too short, or its documents cannot be told apart.
        """
        return [self.order(corpus, "train", context, seed) for corpus in self.corpora]

    def order(self, corpus: Corpus | MapCorpus, split: str, context: int, seed: int) -> SampleOrder:
        """Returns the order of samples in a split of a corpus."""
        align, documents = self.config.align, None
        if isinstance(corpus, MapCorpus):  # each item as a document of one token
            size = getattr(corpus, split).size
            context, align, documents = 1, "document", np.arange(size, dtype=np.int64)
        else:
            size = len(getattr(corpus, split))
            if align != "none":
                documents = corpus.document_starts(split)
        how = {"sampling": self.config.sampling, "align": align, "documents": documents}
        return SampleOrder(size, context=context, seed=seed, **how)


def _hash_of(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def open_own(data: Data, context: int, config: DataConfig) -> Dataset:
    """Opens a caller's own datasets, and reads all items of both splits once.

    Raises:
        UserError: an item is not one of `context` tokens and targets, or random batches are asked
            for.
    """
    if config.eval_batches:
        raise UserError("--data.eval-batches: own datasets are evaluated whole, expected 0")
    tokenizer = data.tokenizer or IdTokenizer(data.vocab_size or 0)
    size = max(data.vocab_size or 0, tokenizer.vocab_size)
    train = MapDataset(data.train, context, size, f"{data.name} (train)")
    val = MapDataset(data.val, context, size, f"{data.name} (val)")
    sha256 = hashlib.sha256(repr([train.sha256, val.sha256]).encode()).hexdigest()
    corpus = MapCorpus(name=data.name, train=train, val=val, tokenizer=tokenizer, sha256=sha256)
    return Dataset(corpora=(corpus,), weights=(1.0,), config=config, template=data.template)


def open_data(
    config: DataConfig, source: str, report: Report = lambda _: None, *, documents: str = "gpt2"
) -> Dataset:
    """Opens the corpus, or the corpora of a mixture `A=0.7,B=0.3`.

    `report` and `documents` are those of `open_corpus`.

    Raises:
        UserError: as `open_corpus`; a weight is not a number above 0; or two corpora were made by
            different tokenizers.
    """
    parts = _parts(source)
    options = {name: getattr(config, name) for name in ("tokenizer", "val_fraction", "encoding")}
    corpora = [open_corpus(x, documents=documents, report=report, **options) for x, _ in parts]
    for corpus in corpora[1:]:
        if not same_tokenizer(corpora[0].tokenizer, corpus.tokenizer):
            kinds = [f"{c.name} ({c.tokenizer.kind}, {c.tokenizer.vocab_size} tokens)"
                     for c in (corpora[0], corpus)]  # fmt: skip
            raise UserError(f"{' and '.join(kinds)} cannot be mixed: expected equal tokenizers")
    total = math.fsum(weight for _, weight in parts)
    weights = tuple(weight / total for _, weight in parts)
    return Dataset(corpora=tuple(corpora), weights=weights, config=config)


def _parts(source: str) -> list[tuple[str, float]]:
    given = [part.strip().rpartition("=") for part in source.split(",")]
    # a pattern may contain a "=" (lang=en/*.jsonl), but no number after it
    numbered = any(equals and _number(weight) is not None for _, equals, weight in given)
    if not numbered or Path(source).expanduser().exists():
        return [(source, 1.0)]
    parts = []
    for part, (name, _, weight) in zip(source.split(","), given):
        value = _number(weight) or 0.0
        if not name or not 0 < value < math.inf:
            raise UserError(
                f"--data.source {source!r}: every source in a mixture needs =WEIGHT, a number above"
                f" 0; got {part!r}"
            )
        parts.append((name, value))
    return parts


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
