"""The keys and values of the tokens so far, so that a new token alone is computed.

Shapes
    B rows, T new tokens, Tmax positions, K key/value heads, D head dim
"""

import torch
from torch import Tensor

from fastgpt.config import ModelConfig


class Cache:
    """Key/value cache: what `GPT.forward` keeps of earlier tokens, in evaluation.

    Rows may be of different lengths. Prompts of different lengths are padded on the right, which
    nothing before sees, and `lengths` is set to their own afterwards: what is beyond is written
    over by the tokens that follow.

    Args:
        config: of the model.
        rows: B.
        size: Tmax, at most the context; no row can hold more tokens.
        device: of the model.
    """

    def __init__(
        self, config: ModelConfig, rows: int, size: int, device: torch.device | str
    ) -> None:
        if not 0 < size <= config.context:
            raise ValueError(f"size: expected 1 to the context of {config.context}, got {size}")
        self.size, self.window = size, config.window
        self.eot_id = config.eot_id if config.document_mask else None
        self.rows = torch.arange(rows, device=device)[:, None]
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        self.used = 0
        """No row holds more: what the host knows of the lengths."""
        self.fresh = True
        """True while there was nothing before the new tokens, which then see each other alone."""
        self.positions = self.lengths[:, None]
        """(B, T), where the new tokens stand."""
        self.starts: Tensor | None = None
        """(B, T), the first position that each of them sees; None: position 0."""
        self.layers = [LayerCache(self) for _ in range(config.num_layers)]
        # where the document at each position begins; all 0 until an end-of-text token is met
        self.documents = torch.zeros(rows, size, dtype=torch.int64, device=device)

    def begin(self, tokens: Tensor) -> Tensor:
        """Makes room for `tokens` (B, T); their positions (B, T).

        Raises:
            ValueError: there is less room than that.
        """
        T = tokens.shape[1]
        if self.used + T > self.size:
            raise ValueError(f"tokens: expected at most {self.size - self.used} more, got {T}")
        self.fresh = self.used == 0
        self.used += T
        self.positions = self.lengths[:, None] + torch.arange(T, device=tokens.device)
        self.lengths = self.lengths + T
        self.starts = None
        if self.eot_id is not None:
            before = self.documents.gather(1, (self.positions[:, :1] - 1).clamp(min=0))
            begins = torch.where(tokens == self.eot_id, self.positions, before)
            self.starts = self.documents[self.rows, self.positions] = begins.cummax(1).values
        if self.window is not None:
            first = self.positions - self.window + 1
            self.starts = first if self.starts is None else torch.maximum(first, self.starts)
        return self.positions


class LayerCache:
    """One layer's part of a `Cache`."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.keys_values: tuple[Tensor, Tensor] | None = None

    def extend(self, k: Tensor, v: Tensor) -> None:
        """Keeps k and v (B, T, K, D) of the new tokens."""
        cache = self.cache
        if self.keys_values is None:  # not before: autocast decides on the dtype
            shape = (len(k), cache.size, *k.shape[2:])
            self.keys_values = k.new_zeros(shape), v.new_zeros(shape)
        for kept, new in zip(self.keys_values, (k, v)):
            kept[cache.rows, cache.positions] = new

    def used(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens so far: views (B, up to Tmax, K, D)."""
        assert self.keys_values is not None
        keys, values = self.keys_values
        return keys[:, : self.cache.used], values[:, : self.cache.used]
