"""Loss of each token of a text, and the tokens that the model held for likeliest in its place."""

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fastgpt.checkpoint import checkpoint
from fastgpt.convert.source import OpenedModel, read
from fastgpt.data.shards import Tokens
from fastgpt.device import cpu
from fastgpt.errors import UserError, counted
from fastgpt.evaluate.text import read_text
from fastgpt.model.gpt import GPT
from fastgpt.parallel.distributed import World
from fastgpt.report.data import Run
from fastgpt.train.data import open_for_run

MOST_TOKENS = 1000
LIKELIEST, HARDEST = 5, 20
BEFORE = 24
"""Number of characters that are shown before a token which was hard."""
VISIBLE = str.maketrans({" ": "␣", "\n": "⏎", "\t": "⇥"})


def coloured_text(run: Run, text: str) -> dict[str, Any]:
    """Scores the first tokens of a text with the best checkpoint of a run, for the page.

    Args:
        text: as `evaluate.text.read_text` takes it; if empty, the validation text of the run.

    Raises:
        UserError: there is no valid checkpoint, or the text cannot be read.
    """
    source = read(str(run.checkpoint))
    run.notes.extend(source.warnings)
    cpu.prepare(compiled=False)
    tokenizer, model = source.known_tokenizer(), source.build_gpt("cpu")
    decode = tokenizer.decode
    all_ids = read_text(text, tokenizer)[0] if text else _validation(run, source)
    ids = all_ids[: MOST_TOKENS + 1].astype(np.int64)
    if len(ids) < 2:
        raise UserError(f"the text has {counted(len(ids), 'token')}: expected at least 2")
    losses, log_p, likeliest = token_losses(model, torch.from_numpy(ids))

    def after(before: int, token: int) -> str:
        """Decodes a token that follows another one; alone it may lack the space before it."""
        both, first = decode([before, token]), decode([before])
        return both[len(first) :] if first and both.startswith(first) else decode([token])

    first, tokens, likely = decode(ids[:1]), [], []
    for i, (loss, p) in enumerate(zip(losses.tolist(), log_p.exp().tolist())):
        token = after(ids[i], ids[i + 1])
        others = (after(ids[i], other).translate(VISIBLE) for other in likeliest[i].tolist())
        likely.append([f"{100 * chance:6.2f} %  {other}" for chance, other in zip(p, others)])
        said = f"{token.translate(VISIBLE)}  loss {loss:.3f}"
        tokens.append((token, loss, "\n".join([said, *likely[i]])))
    texts = [first, *(token for token, _, _ in tokens)]
    hardest = losses.argsort(descending=True)[:HARDEST].tolist()
    return {
        "name": text or f"{run.config.data.source}, held out", "first": first, "tokens": tokens,
        "checkpoint": f"{source.path.name} (step {checkpoint.read_record(source.path)['step']:,})",
        "loss": losses.mean().item(),
        "hardest": [
            ("".join(texts[: i + 1])[-BEFORE:], texts[i + 1].translate(VISIBLE),
             f"{tokens[i][1]:.2f}", likely[i][0]) for i in hardest
        ],
    }  # fmt: skip


def _validation(run: Run, source: OpenedModel) -> Tokens:
    """Opens the validation tokens of a run, from the cache in which training has left them.

    Raises:
        UserError: they cannot be read, or are made by another tokenizer.
    """
    if run.config.data.align == "conversation":
        raise UserError("conversations are not coloured: pass a text with --text")
    opened = open_for_run(run.config, None, source, World(), run.notes.append)
    recorded = run.manifest.get("data")
    if isinstance(recorded, dict) and opened.sha256 != recorded.get("sha256"):
        what = run.config.data.source
        run.notes.append(f"{what} has changed since the run, and so has the coloured text.")
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
