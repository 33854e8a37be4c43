"""Key/value cache of text generation, so that each step computes the new tokens only.

Shapes
    B rows, T new tokens, Tmax positions, K key/value heads, D head dim
"""

import torch
from torch import Tensor

from fastgpt.config.model import ModelConfig


class Cache:
    """Key/value cache of earlier tokens, which `GPT.forward` fills and reads in evaluation.

    Rows may have different lengths: prompts are padded on the right, and `lengths` is set to their
    true lengths after the first forward pass. The causal mask hides the padding from earlier
    tokens, and later tokens overwrite it.

    Args:
        rows: B.
        size: Tmax, the most tokens that a row can hold; at most the context.
    """

    def __init__(
        self, config: ModelConfig, rows: int, size: int, device: torch.device | str
    ) -> None:
        self.size, self.window = size, config.window
        self.eot_id = config.eot_id if config.document_mask else None
        self.rows = torch.arange(rows, device=device)[:, None]
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        self.used = 0
        """Upper bound of `lengths`, known without a host sync."""
        self.on_cpu = torch.device(device).type == "cpu"
        self.fresh = True
        """True if the new tokens are the first ones, which attend only to each other."""
        self.positions = self.lengths[:, None]
        """(B, T), position of each new token."""
        self.starts: Tensor | None = None
        """(B, T), first position that each new token attends to; None: position 0."""
        self._hidden: Tensor | None = None
        self.layers = [LayerCache(self) for _ in range(config.num_layers)]
        # start of the document at each position; all 0 until the first end-of-text token
        self.documents = torch.zeros(rows, size, dtype=torch.int64, device=device)

    def begin(self, tokens: Tensor) -> Tensor:
        """Reserves room for `tokens` (B, T), and returns their positions (B, T)."""
        T = tokens.shape[1]
        if self.used + T > self.size:
            raise ValueError(f"tokens: expected at most {self.size - self.used} more, got {T}")
        self.fresh = self.used == 0
        self.used += T
        self.positions = self.lengths[:, None] + torch.arange(T, device=tokens.device)
        self.lengths = self.lengths + T
        self.starts = self._hidden = None
        if self.eot_id is not None:
            before = self.documents.gather(1, (self.positions[:, :1] - 1).clamp(min=0))
            begins = torch.where(tokens == self.eot_id, self.positions, before)
            self.starts = self.documents[self.rows, self.positions] = begins.cummax(1).values
        if self.window is not None:
            first = self.positions - self.window + 1
            self.starts = first if self.starts is None else torch.maximum(first, self.starts)
        return self.positions

    def span(self) -> int:
        """Returns the number of positions that attention reads: on a CPU those in use.

        Elsewhere it is all of them, so that attention has the same shape for every token. cuDNN,
        PyTorch's first choice on sm_90 and sm_100, plans anew for each size and stride of queries,
        keys, values and mask; each plan takes about 0.4 s.
        """
        return self.used if self.on_cpu else self.size

    def hidden(self, dtype: torch.dtype) -> Tensor:
        """Returns the summand (B, T, `span`) of scores: -inf where a new token does not attend."""
        if self._hidden is None:  # once for all layers; of bool, SDPA would make it in each
            places = torch.arange(self.span(), device=self.lengths.device)
            hidden = places > self.positions[..., None]
            if self.starts is not None:
                hidden |= places < self.starts[..., None]
            zeros = torch.zeros_like(hidden, dtype=dtype)
            self._hidden = zeros.masked_fill_(hidden, float("-inf"))
        return self._hidden


class LayerCache:
    """Keys and values of one layer in a `Cache`."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.keys_values: tuple[Tensor, Tensor] | None = None

    def extend(self, k: Tensor, v: Tensor) -> None:
        """Stores the keys and values (B, T, K, D) of the new tokens."""
        cache = self.cache
        if self.keys_values is None:  # allocated here, because autocast decides the dtype
            shape = (len(k), cache.size, *k.shape[2:])
            # PyTorch's attention on CPUs is 3 to 9 times as fast in fp32 as in bf16
            dtype = torch.promote_types(k.dtype, torch.float32) if cache.on_cpu else k.dtype
            self.keys_values = k.new_zeros(shape, dtype=dtype), v.new_zeros(shape, dtype=dtype)
        for cached, new in zip(self.keys_values, (k, v)):
            cached[cache.rows, cache.positions] = new.to(cached.dtype)

    def read(self) -> tuple[Tensor, Tensor]:
        """Returns views of keys and values, (B, `Cache.span()`, K, D)."""
        assert self.keys_values is not None
        keys, values = self.keys_values
        return keys[:, : self.cache.span()], values[:, : self.cache.span()]
