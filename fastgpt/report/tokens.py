"""Loss of each token of a text, and the tokens that the model held for likeliest in its place."""

from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fastgpt.checkpoint import checkpoint
from fastgpt.convert.source import OpenedModel, read
from fastgpt.data.dataset import open_data
from fastgpt.data.shards import Tokens
from fastgpt.data.tokenizers import TOKENIZER_FILE, Tokenizer, same_tokenizer
from fastgpt.display import PrepareProgress
from fastgpt.errors import UserError, counted
from fastgpt.evaluate.__main__ import scorer_of
from fastgpt.evaluate.text import read_text
from fastgpt.files import data_dir
from fastgpt.model.gpt import GPT
from fastgpt.report.data import Run

MOST_TOKENS = 1000
LIKELIEST = 5


def coloured_text(run: Run, text: str) -> dict[str, Any]:
    """Scores the first tokens of a text with the best checkpoint of a run, for the page.

    Args:
        text: as `evaluate.text.read_text` takes it; if empty, the validation text of the run.

    Raises:
        UserError: there is no valid checkpoint, or the text cannot be read.
    """
    source = read(str(run.checkpoint))
    run.notes.extend(source.warnings)
    scorer = scorer_of(source, 1, "cpu", "fp32")
    decode = scorer.tokenizer.decode
    all_ids = read_text(text, scorer)[0] if text else _validation(run, source, scorer.tokenizer)
    ids = all_ids[: MOST_TOKENS + 1].astype(np.int64)
    if len(ids) < 2:
        raise UserError(f"the text has {counted(len(ids), 'token')}: expected at least 2")
    losses, log_p, likeliest = token_losses(scorer.model, torch.from_numpy(ids))

    def after(before: int, token: int) -> str:
        """Decodes a token that follows another one; alone it may lack the space before it."""
        both, first = decode([before, token]), decode([before])
        return both[len(first) :] if first and both.startswith(first) else decode([token])

    tokens = []
    for i, (loss, p) in enumerate(zip(losses.tolist(), log_p.exp().tolist())):
        others = [after(ids[i], other) for other in likeliest[i].tolist()]
        chances = [round(chance, 4) for chance in p]
        tokens.append((after(ids[i], ids[i + 1]), round(loss, 3), list(zip(others, chances))))
    scored_by = f"{source.path.name} (step {checkpoint.read_record(source.path)['step']:,})"
    name = text or f"{run.config.data.source}, held out"
    return {"name": name, "checkpoint": scored_by, "loss": losses.mean().item(),
            "first": decode(ids[:1]), "tokens": tokens}  # fmt: skip


def _validation(run: Run, source: OpenedModel, tokenizer: Tokenizer) -> Tokens:
    """Opens the validation tokens of a run, from the cache in which training has left them.

    Raises:
        UserError: they cannot be read, or are made by another tokenizer.
    """
    data, manifest = run.config.data, run.manifest.get("data")
    if data.align == "conversation":
        raise UserError("conversations are not coloured: pass a text with --text")
    if data.tokenizer == "auto":
        file = str(source.path / TOKENIZER_FILE)
        data = replace(data, tokenizer=tokenizer.kind if run.config.init_from is None else file)
    where, (kind, _, name) = data.source, data.source.partition(":")
    if kind == "prepared":
        folder = data_dir() / (name or "gpt2")
        where = str(folder) if name or folder.exists() else "builtin"
    with PrepareProgress() as report:
        opened = open_data(data, where, report)
    if not same_tokenizer(opened.tokenizer, tokenizer):
        raise UserError(f"{data.source} was tokenized in another way than the run")
    if isinstance(manifest, dict) and opened.sha256 != manifest.get("sha256"):
        run.notes.append(f"{data.source} has changed since the run, and so has the coloured text.")
    return cast("Tokens", opened.corpora[0].val)


@torch.no_grad()
def token_losses(model: GPT, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the loss of each token but the first, with at least half of the context before it.

    Args:
        ids: (N,) int64, N >= 2.

    Returns:
        Loss in nats (N - 1,); the log-probabilities and ids of the likeliest tokens, (N - 1, 5) or
        fewer.
    """
    context, found, scored = model.config.context, [], 0
    while scored < len(ids) - 1:
        start = max(0, scored - context // 2)
        logits = model(ids[None, start : min(start + context, len(ids) - 1)])
        log_p = logits[0, scored - start :].float().log_softmax(-1)
        targets = ids[scored + 1 :][: len(log_p)]
        losses = -log_p.gather(-1, targets[:, None])[:, 0]
        found.append((losses, *log_p.topk(min(LIKELIEST, log_p.shape[-1]))))
        scored += len(log_p)
    losses, values, likeliest = (torch.cat(parts) for parts in zip(*found))
    return losses, values, likeliest
