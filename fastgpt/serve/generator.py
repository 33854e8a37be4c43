"""Requests that share a batch: one thread steps the model, and texts come and go in between."""

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from queue import Full

import torch
from torch import Tensor

from fastgpt.kernels import batch_invariant
from fastgpt.model.gpt import GPT
from fastgpt.ops.kv_cache import Cache
from fastgpt.sampling.streaming import GeneratedText, TextDelta


@dataclass(eq=False, slots=True)
class TextRequest:
    """A text to continue, which fits into the context."""

    prompt: Tensor
    """(T,) int64 on the CPU."""
    text: GeneratedText
    put: Callable[[TextDelta | Exception], None]
    """Called in the generator's thread with each piece, or the error that ends it; never fails."""
    deadline: float
    """Time by `time.monotonic` at which it is ended."""
    gone: threading.Event
    """Set in any thread to free its slot before the next token."""
    length: int = 0
    """Number of tokens in the cache."""

    def error(self) -> Exception | None:
        """Returns why it ends before its text does, if it does."""
        if self.gone.is_set():
            return ConnectionAbortedError("nobody waits for the text any more")
        return TimeoutError("the time is over") if time.monotonic() > self.deadline else None


class BatchGenerator:
    """Continues texts in one batch, in a thread of its own.

    Before each step a waiting text enters a free slot, and its prompt is computed; then all texts
    get a token. Rows in use are the first ones: the last one moves to where a text has left. A row
    is zeroed for each text, because attention adds what the last one left: it may not be finite.

    Args:
        slots: number of texts in the batch.
        queue: number of further texts that may wait.
        exact: each text gets the bits that it would get alone (`kernels.batch_invariant`).
        autocast: makes the context in which the model runs.
    """

    def __init__(
        self, model: GPT, *, slots: int = 16, queue: int = 128, exact: bool = False,
        autocast: Callable[[], AbstractContextManager] = nullcontext,
    ) -> None:  # fmt: skip
        self.model, self.slots, self.queue = model, slots, queue
        self.running, self.waiting = list[TextRequest](), deque[TextRequest]()
        self._changed, self.closed = threading.Condition(), False
        self.device = next(model.parameters()).device
        self.cache = Cache(model.config, slots, model.config.context, self.device)
        with autocast(), torch.no_grad():  # a first token allocates the layers
            model(torch.zeros(slots, 1, dtype=torch.int64, device=self.device), cache=self.cache)
        self._thread = threading.Thread(target=self._run, args=(exact, autocast), daemon=True)
        self._thread.start()

    def submit(self, requests: list[TextRequest]) -> None:
        """Lets texts wait for a slot; raises `queue.Full` if too many do."""
        with self._changed:
            if self.closed:
                raise ConnectionAbortedError("the server ends")
            if len(self.waiting) + len(requests) > self.queue:
                raise Full(f"{len(self.waiting)} texts wait already: try again later")
            self.waiting.extend(requests)
            self._changed.notify()

    def close(self) -> None:
        """Ends all texts and the thread; a handler of signals only sets `closed`."""
        with self._changed:
            self.closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self, exact: bool, autocast: Callable[[], AbstractContextManager]) -> None:
        with batch_invariant(exact), autocast(), torch.no_grad():
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self.closed or self.running or self.waiting)
                    if self.closed:  # with the lock: a text that `submit` takes now is told, too
                        break
                try:
                    self._step()
                except Exception as error:  # a bug, or no memory: other texts may do better
                    traceback.print_exc()
                    for request in self.running:
                        request.put(error)
                    self.running.clear()
        for request in (*self.running, *self.waiting):
            request.put(ConnectionAbortedError("the server ends"))

    def _rows(self, first: int, lengths: list[int]) -> Cache:
        """Returns the rows from `first` on, whose texts have these lengths, as a cache."""
        rows = slice(first, first + len(lengths))
        cache = Cache(self.model.config, len(lengths), self.model.config.context, self.device)
        cache.lengths, cache.used = torch.tensor(lengths, device=self.device), max(lengths)
        cache.documents = self.cache.documents[rows]
        for layer, full in zip(cache.layers, self.cache.layers):
            if full.keys_values:
                layer.keys_values = full.keys_values[0][rows], full.keys_values[1][rows]
        return cache

    def _step(self) -> None:
        enters = []
        with self._changed:
            for request in (*self.waiting, *self.running):
                if error := request.error():
                    self._leave(request)
                    request.put(error)
            if self.waiting and len(self.running) < self.slots:
                enters = [self.waiting.popleft()]
        if enters:
            self.running += enters
            for state in self._states():
                state[len(self.running) - 1] = 0
            tokens = enters[0].prompt[None].to(self.device)
            cache = self._rows(len(self.running) - 1, [0])
            enters[0].length = tokens.shape[1] - 1
            last = cache.lengths + enters[0].length
            self._extend(enters, self.model(tokens, cache=cache, last=last))
        if self.running:
            # one shape on a GPU (`Cache.span`), on a CPU no more rows than needed
            idle = [0] * (0 if self.device.type == "cpu" else self.slots - len(self.running))
            cache = self._rows(0, [request.length for request in self.running] + idle)
            last = torch.tensor(
                [request.text.last for request in self.running] + idle, device=self.device
            )
            self._extend([*self.running], self.model(last[:, None], cache=cache))

    def _extend(self, requests: list[TextRequest], logits: Tensor) -> None:
        """Extends texts by a token each, from logits (B, 1, V) of as many rows or more."""
        for request, new in zip(requests, logits[:, -1].float().cpu()):
            request.length += 1
            try:
                found = request.text.add(new)
            except Exception as error:  # logits that are not finite: other texts know nothing of it
                traceback.print_exc()
                found = error
            if isinstance(found, Exception) or found.finish:
                self._leave(request)
            request.put(found)

    def _leave(self, request: TextRequest) -> None:
        """Frees the place of a text; the text of the last row moves to its row."""
        if request in self.waiting:
            self.waiting.remove(request)
            return
        row, last = self.running.index(request), self.running.pop()
        if last is not request:
            self.running[row] = last
            for state in self._states():
                state[row] = state[len(self.running)]

    def _states(self) -> list[Tensor]:
        """Returns all that is kept of the texts, each tensor with a row for a text."""
        pairs = (layer.keys_values or () for layer in self.cache.layers)
        return [self.cache.documents, *(state for pair in pairs for state in pair)]
