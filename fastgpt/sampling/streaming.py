"""Text that appears while it is generated."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from torch import Tensor

from fastgpt.data.tokenizers import Tokenizer
from fastgpt.errors import UserError
from fastgpt.model.generation import OPTIONS, check_options, check_tokens, draw, following
from fastgpt.model.gpt import GPT
from fastgpt.sampling.text import encode_prompt, stop_strings
from fastgpt.terminal import REPLACEMENT, print_text

UNFINISHED = 3
"""Most tokens, and replacement characters in their place, that may yet become one character."""


@dataclass(frozen=True, slots=True)
class Token:
    """A token that was drawn."""

    id: int
    offset: int
    """Index of its first character in the continuation."""
    logprob: float
    """Natural logarithm of its probability before temperature and other options."""
    top: list[tuple[int, float]]
    """The likeliest ids and their log-probabilities."""


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Part of a continuation; `str` gives its text."""

    text: str
    tokens: list[Token]
    """Tokens whose text begins in the piece; in the last one also those without text."""
    finish: Literal["stop", "length"] | None = None
    """Why it is the last piece: end of text or stop string, or number of tokens."""

    def __str__(self) -> str:
        return self.text

    def __add__(self, later: "TextDelta") -> "TextDelta":
        return TextDelta(self.text + later.text, self.tokens + later.tokens, later.finish)


class GeneratedText:
    """Continuation of one prompt (T,), which logits extend by a token each, decoded as it grows.

    The arguments are those of `stream`; with `strip` without white space at both ends.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Tensor, *, max_new_tokens: int,
        stop: str | Sequence[str] = (), logprobs: int = 0, strip: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        check_options(
            max_new_tokens=max_new_tokens, **{k: x for k, x in options.items() if k in OPTIONS}
        )
        if logprobs < 0:
            raise UserError(f"logprobs is {logprobs}: expected 0 or more")
        self.tokenizer, self.left, self.last, self.text = tokenizer, max_new_tokens, -1, ""
        self.stop, self.logprobs, self.strip = stop_strings(stop), logprobs, strip
        self.draw, self.ends = partial(draw, **options), tokenizer.end_ids()
        self.seen = torch.zeros(1, tokenizer.vocab_size, dtype=torch.bool)
        self.seen[0, prompt[prompt < tokenizer.vocab_size]] = True
        # the newest ids: first the context, a text that is complete
        self.ids, self.context = prompt.tolist(), len(prompt)
        self.decoded = len(tokenizer.decode(self.ids))
        self.sent, self.pending = 0, list[Token]()

    def add(self, logits: Tensor) -> TextDelta:
        """Draws a token from logits (V,), and returns the text that has become certain."""
        logits = logits[None, : self.tokenizer.vocab_size].float().cpu()
        self.last = int(self.draw(logits, self.seen))
        self.seen[0, self.last] = True
        self.left -= 1
        ended = self.last in self.ends
        if not ended:
            scores = logits[0].log_softmax(-1)
            top = scores.topk(min(self.logprobs, len(scores)))
            pairs = [*zip(top.indices.tolist(), top.values.tolist())]
            self.pending.append(Token(self.last, len(self.text), float(scores[self.last]), pairs))
            self.ids.append(self.last)
        self._decode(last=ended or not self.left)
        found = [i for i in (self.text.find(stop, self.sent) for stop in self.stop) if i >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.pending = [token for token in self.pending if token.offset < min(found)]
        return self._delta("stop" if found or ended else None if self.left else "length")

    def _decode(self, last: bool) -> None:
        """Adds the text of the newest id, unless it is the last without half a character."""
        text = self.tokenizer.decode(self.ids)
        broken = 0 if last else len(text) - len(text.rstrip(REPLACEMENT))
        # few bytes hold back all that is new, as some decoders replace bytes before them as well
        few = len(self.ids) - self.context <= UNFINISHED
        broken = broken and (len(text) - self.decoded if few else min(UNFINISHED, broken))
        new = text[self.decoded : len(text) - broken]
        self.text, self.decoded = self.text + new, self.decoded + len(new)
        if new and not broken:
            self.ids = self.ids[self.context :]
            self.context, self.decoded = len(self.ids), len(self.tokenizer.decode(self.ids))
        if self.strip and not self.sent:
            self.text = self.text.lstrip()

    def _delta(self, finish: Literal["stop", "length"] | None) -> TextDelta:
        """Releases the text but for an end that may become a stop string, or be stripped."""
        end = len(self.text)
        if not finish:
            most = end - self.sent  # a stop string that began earlier would have been held back
            begun = (stop[:n] for stop in self.stop for n in range(1, min(len(stop), most + 1)))
            end -= max((len(part) for part in begun if self.text.endswith(part)), default=0)
        if self.strip:
            end = max(self.sent, len(self.text[:end].rstrip()))
        ready = [token for token in self.pending if finish or token.offset < end]
        self.pending = self.pending[len(ready) :]
        text, self.sent = self.text[self.sent : end], end
        return TextDelta(text, ready, finish)


def stream(
    model: GPT, tokenizer: Tokenizer, prompt: str | Tensor, *, exact: bool = False, **options: Any
) -> Iterator[TextDelta]:
    """Continues a text, and yields it piece by piece, in whole characters, as it is generated.

    Args:
        model: in evaluation mode.
        prompt: text, or its ids (T,) int64.
        exact: as in `fastgpt.generate`.
        options: `max_new_tokens`; `stop`, one text or several before which it ends; `logprobs`,
            number of likeliest tokens to report; those of `fastgpt.generate` for drawing.

    Yields:
        TextDelta: its `str` is the text; `tokens` have ids and log-probabilities.

    Raises:
        UserError: as `fastgpt.encode_prompt` and `fastgpt.generate`.

    >>> model, tokenizer = fastgpt.load("runs/mine")
    >>> pieces = fastgpt.stream(model, tokenizer, "To be", max_new_tokens=20, temperature=0.8)
    >>> text = "".join(str(piece) for piece in pieces)
    """
    ids = encode_prompt(prompt, tokenizer) if isinstance(prompt, str) else prompt.cpu()
    check_tokens(ids[None], model.config)
    text = GeneratedText(tokenizer, ids, **options)
    tokens = F.pad(ids[None], (0, text.left)).to(next(model.parameters()).device)
    for logits in following(model, tokens, torch.tensor([len(ids)]), len(ids), exact=exact):
        piece = text.add(logits[0])
        tokens[0, -1 - text.left] = text.last
        yield piece
        if piece.finish:
            break


def print_stream(pieces: Iterable[str], *, interruptible: bool = False) -> str:
    """Prints text as it comes, as `print_text` does, and returns it.

    Ctrl-C ends the program, or if `interruptible` the text.
    """
    said = held = ""
    try:
        for piece in pieces:
            said, held = said + piece, held + piece
            if not held.endswith("\r"):  # a newline may follow
                print_text(held, end="")
                held = ""
    except KeyboardInterrupt:
        if not interruptible:
            raise
    print_text(held)
    return said
