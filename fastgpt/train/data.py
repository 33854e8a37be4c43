"""Data of a run, opened by every rank: a corpus, conversations or a caller's datasets."""

from dataclasses import replace
from pathlib import Path

from fastgpt.config.config import Config
from fastgpt.config.recipes import RECIPES
from fastgpt.convert.source import OpenedModel
from fastgpt.data.corpus import Corpus
from fastgpt.data.dataset import Dataset, open_data, open_own
from fastgpt.data.items import Data, MapCorpus
from fastgpt.data.order import SampleOrder
from fastgpt.data.sources import resolve_source
from fastgpt.data.tokenizers import Tokenizer, make_tokenizer
from fastgpt.errors import UserError, counted
from fastgpt.parallel.distributed import World
from fastgpt.sampling.chat import open_conversations
from fastgpt.terminal import preparing
from fastgpt.train import init_from
from fastgpt.train.init_from import Warn

GPT2_TOKENS = 50_257
"""Size of GPT-2's vocabulary, which the recipes of its models fix."""


def open_for_run(
    config: Config, data: Data | None, source: OpenedModel | None, world: World, warn: Warn
) -> Dataset:
    """Opens the data of a run.

    It is a `UserError` if it differs between ranks, or has another tokenizer than the model.
    """
    talks = data is None and config.data.align == "conversation"
    where = config.data.source
    if data is None and not talks:
        where = resolve_source(where, warn)

    def open_all() -> Dataset:
        own = _conversations(config, source) if talks else data
        if own is not None:
            return open_own(own, config.model.context, config.data)
        ends = config.data.align != "none" or config.model.document_mask  # bytes have none
        documents = "gpt2" if ends or (config.model.vocab_size or 0) >= GPT2_TOKENS else "bytes"
        settings = init_from.with_tokenizer(config, source)
        with preparing(quiet=not world.is_main) as report:
            return open_data(settings, where, report, documents=documents)

    def open_first() -> None:
        open_all().orders(config.model.context, config.seed)

    if data is None and world.size > 1:  # the main rank downloads, prepares and checks it first
        world.on_rank0(open_first, world.long_timeout_group())
    opened = open_all()
    if source is not None:
        init_from.check_vocabulary(source, opened.tokenizer)
    if (main := world.broadcast_object(opened.fingerprint)) != opened.fingerprint:
        raise UserError(
            f"{opened.name} differs between this rank ({opened.fingerprint[:12]}) and the main rank"
            f" ({main[:12]}): give every host the same prepared directory"
        )
    return opened


def _conversations(config: Config, source: OpenedModel | None) -> Data:
    kind = init_from.with_tokenizer(config, source).tokenizer
    return open_conversations(
        Path(config.data.source).expanduser(),
        make_tokenizer("bytes" if kind == "auto" else kind, None),
        init_from.chat_template(config, source),
        context=config.model.context,
        packed=config.model.document_mask,
        val_fraction=config.data.val_fraction,
    )


def with_vocabulary(config: Config, tokenizer: Tokenizer) -> Config:
    """Fills in the size of the vocabulary, and the end-of-text token for a document mask.

    The vocabulary has as many tokens as the tokenizer, unless `config` asks for more.
    """
    asked, needed = config.model.vocab_size, tokenizer.vocab_size
    if asked is not None and asked < needed:
        raise UserError(
            f"--model.vocab-size is {asked}: the {tokenizer.kind} tokenizer needs at least {needed}"
        )
    eot_id = tokenizer.eot_id if config.model.document_mask else None
    if config.model.document_mask and eot_id is None:
        raise UserError(
            f"--model.document-mask: the {tokenizer.kind} tokenizer has no end-of-text token to"
            " tell documents apart: use another tokenizer, for example gpt2"
        )
    model = replace(config.model, vocab_size=asked or needed, eot_id=eot_id)
    return replace(config, model=model)


def check_splits(config: Config, data: Dataset, orders: list[SampleOrder], warn: Warn) -> None:
    """Warns if an epoch uses less than half of a corpus; a short split is a `UserError`."""
    least = config.model.context + 1 if config.data.sampling == "lecture" else 2
    for corpus, order in zip(data.corpora, orders):
        held, covered = len(corpus.val), order.coverage()
        if held < least:
            raise UserError(
                f"{corpus.name}: {counted(held, 'token')} held out, expected at least {least}:"
                " use more text or a larger --data.val-fraction"
            )
        if covered < 0.5:
            warn(
                f"{corpus.name}: with --data.align {config.data.align} an epoch trains on"
                f" {covered:.0%} of its tokens, because its documents are long for a"
                f" context of {config.model.context}"
            )


def sample_prompt(config: Config, corpus: Corpus | MapCorpus) -> str:
    """Returns the prompt of the samples: the recipe's own on its data, else words of the corpus."""
    if config.data.source == RECIPES[config.recipe][1].data.source:
        return "def " if config.recipe == "baby" else "\n"
    return corpus.first_words()
