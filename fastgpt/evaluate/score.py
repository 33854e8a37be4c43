"""Log-likelihood of texts, as EleutherAI's lm-evaluation-harness defines it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence

from fastgpt.data.tokenizers import Tokenizer
from fastgpt.errors import UserError
from fastgpt.model.gpt import GPT
from fastgpt.parallel.distributed import World
from fastgpt.parallel.signals import Stopped, StopSignal, SyncedStop

Pair = tuple[list[int], list[int]]
"""Token ids of a context and of its continuation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scorer:
    """A model in evaluation mode, and how it computes."""

    model: GPT
    tokenizer: Tokenizer
    batch: int
    """Number of texts computed at once."""
    device: str
    autocast: AbstractContextManager
    stop: StopSignal | SyncedStop | None = None
    """Checked before each batch."""
    doing: Callable[[str], None] | None = None
    """Called before each batch."""
    together: World | None = None
    """Ranks that meet in each forward, and so compute as many batches; None: they do not."""

    @torch.no_grad()
    def log_likelihoods(self, pairs: Sequence[Pair]) -> list[float]:
        """Computes log p(continuation | context) in nats of each pair, in batches of like length.

        Of a pair longer than the model's context, the first tokens are cut.

        Raises:
            Stopped: `stop` was received.
        """
        order = sorted(range(len(pairs)), key=lambda i: -sum(map(len, pairs[i])))
        found, most = [0.0] * len(pairs), self.model.config.context + 1
        starts = range(0, len(order), self.batch)
        if self.together is not None:  # the last ones may have no texts
            batches = int(self.together.gather(torch.tensor([len(starts)])).max())
            starts = range(0, batches * self.batch, self.batch)
        for start in starts:
            if self.stop is not None and self.stop.received:
                raise Stopped
            if self.doing is not None:
                self.doing("scoring a batch of a task")
            rows = order[start : start + self.batch]
            texts = [torch.tensor((pairs[i][0] + pairs[i][1])[-most:]) for i in rows]
            texts = texts or [torch.zeros(2, dtype=torch.int64)]
            x = pad_sequence([text[:-1] for text in texts], batch_first=True)
            with self.autocast:
                logits = self.model(x.to(self.device))
            for i, text, row in zip(rows, texts, logits):
                targets = text[-len(pairs[i][1]) :]
                log_p = row[: len(text) - 1][-len(targets) :].float().log_softmax(-1).cpu()
                found[i] = log_p.gather(-1, targets[:, None]).double().sum().item()
        return found

    def encode_pair(self, context: str, continuation: str) -> Pair:
        """Encodes both as one text, and cuts it where the context's own tokens end.

        Spaces at the end of the context are moved to the continuation. The end-of-text token
        stands for an empty context.

        Raises:
            UserError: the continuation has no token, or more than the model's context, or the
                tokenizer cannot encode it, or lacks an end-of-text token.
        """
        whole = self.tokenizer.encode(context + continuation).tolist()
        before = self.tokenizer.encode(context.rstrip()).tolist() if context else []
        new = whole[len(before) :]
        if not 0 < len(new) <= self.model.config.context:
            raise UserError(
                f"{continuation[:40]!r} has {len(new)} tokens: expected 1 to the model's context,"
                f" {self.model.config.context}"
            )
        if not before:
            if self.tokenizer.eot_id is None:
                raise UserError(
                    "a text without a context needs an end-of-text token before it, which the"
                    f" {self.tokenizer.kind} tokenizer does not have"
                )
            before = [self.tokenizer.eot_id]
        return before, new
