"""GPT-2, with the changes that later GPTs made as options of `ModelConfig`.

A model calls the implementations in `self.ops`; `fastgpt.ops.protocols` says what each computes.

Shapes
    B batch, T tokens, C width, H query heads, K key/value heads, D head dim, F feed-forward width,
    V vocabulary
    positions: a slice of T, the same for each row, or (B, T) int64
Source
    Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"; parameter names are
    GPT-2's.
"""

import math
from dataclasses import fields, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from torch import Tensor, nn

from fastgpt.config.config import OpsConfig, Recompute
from fastgpt.config.model import ModelConfig
from fastgpt.errors import UserError
from fastgpt.kernels import is_batch_invariant
from fastgpt.kernels.runtime import autocast_dtype
from fastgpt.model.block import Block, Dropout, Embedding, Norm
from fastgpt.model.context_split import ContextShard
from fastgpt.model.generation import check_tokens, generate
from fastgpt.ops.dtensor import local
from fastgpt.ops.kv_cache import Cache
from fastgpt.ops.protocols import Ops
from fastgpt.ops.tables import select
from fastgpt.ops.torch_ops import head_logits


class GPT(nn.Module):
    """GPT from tokens to logits, or with targets to the loss; `fastgpt.build_model` makes one.

    Args:
        config: `vocab_size` must be set.
        ops: from `fastgpt.ops.select`.
        z_loss: weight of the z-loss, used in training only; in evaluation the loss is the plain
            cross-entropy.
        residual_dtype: dtype of the residual stream, under an autocast to that dtype; None: that of
            the embeddings, fp32.
        recompute: see `Block`.
        cp_shard: this rank's part of each sequence when a loss is computed; None: all of it.

    Raises:
        UserError: the size of the vocabulary is missing.

    >>> config = fastgpt.ModelConfig(num_layers=1, num_heads=2, dim=16, vocab_size=50)
    >>> from fastgpt.ops import select
    >>> model = fastgpt.GPT(config, select(fastgpt.OpsConfig(), "cpu"))
    >>> model.num_params()
    20496
    """

    def __init__(
        self, config: ModelConfig, ops: Ops, *, z_loss: float = 0.0,
        residual_dtype: torch.dtype | None = None, recompute: Recompute = "none",
        cp_shard: ContextShard | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if config.vocab_size is None:
            raise UserError("vocab_size is missing: expected the number of tokens")
        assert config.eot_id is not None or not config.document_mask
        self.config, self.ops = config, ops
        self.z_loss, self.residual_dtype, self.cp_shard = z_loss, residual_dtype, cp_shard
        self.recompute: Recompute = recompute
        self.wte = Embedding(config.padded_vocab, config.dim)
        self.wpe = POSITIONS[config.position](config) if config.position in POSITIONS else None
        self.rotary = Rotary(config) if config.position == "rotary" else None
        self.dropout = Dropout(config.dropout_at("embedding"), ops)
        self.h = nn.ModuleList(self.block(config, ops) for _ in range(config.num_layers))
        self.ln_f = Norm(config, ops) if config.pre_norm and config.is_gpt else None
        self.lm_head = None
        if not config.tied:
            self.lm_head = nn.Linear(config.dim, config.padded_vocab, bias=config.bias_at("head"))
        self._init_weights()
        self.register_state_dict_post_hook(_cut_padding)
        self.register_load_state_dict_pre_hook(restore_padding)

    def generate(self, tokens: Tensor, **options: Any) -> Tensor:
        """Continues each row of tokens (B, T), in evaluation mode.

        Args:
            options: those of `fastgpt.generate`.

        >>> model = fastgpt.GPT.from_config(num_layers=1, num_heads=2, dim=16, vocab_size=50)
        >>> model.generate(torch.tensor([[1, 2]]), max_new_tokens=3).shape
        torch.Size([1, 5])
        """
        training = self.training
        try:
            return generate(self.eval(), tokens, **options)
        finally:
            self.train(training)

    @classmethod
    def from_config(
        cls, config: ModelConfig | None = None, *, device: str = "cpu", **settings: Any
    ):
        """Builds an untrained model, with the ops that suit the device.

        Args:
            config: settings of the model; by default those of GPT-2 with 124M parameters.
            device: `cpu`, `cuda`, `xpu` or `mps`.
            settings: fields of `ModelConfig` that differ, such as `num_layers=4`.

        Raises:
            UserError: the size of the vocabulary is missing, or settings do not go together.

        >>> model = fastgpt.GPT.from_config(num_layers=1, num_heads=2, dim=16, vocab_size=50)
        >>> model(torch.zeros(1, 10, dtype=torch.long)).shape
        torch.Size([1, 10, 50])
        """
        if unknown := settings.keys() - {field.name for field in fields(ModelConfig)}:
            raise UserError(f"ModelConfig has no field {', '.join(sorted(unknown))}")
        config = replace(config or ModelConfig(), **settings)
        if not config.is_gpt:
            raise UserError(f"{config.architecture} is no GPT: expected fastgpt.build_model")
        return cls(config, select(OpsConfig(), device)).to(device)

    def block(self, config: ModelConfig, ops: Ops) -> nn.Module:
        """Builds one layer."""
        return Block(config, ops, self.recompute, self.cp_shard)

    def _init_weights(self) -> None:
        init, depth = self.config.init, 2 * self.config.num_layers
        for name, weight in self.named_parameters():
            if init != "torch" and weight.dim() == 2:
                scaled = init == "gpt2" and name.endswith("c_proj.weight")
                nn.init.normal_(weight, std=0.02 / math.sqrt(depth if scaled else 1))
            elif init != "torch" and name.endswith("bias"):
                nn.init.zeros_(weight)
            if name in VOCAB_TABLES:
                weight.detach()[self.config.vocab_size :] = 0

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, cache: Cache | None = None,
        last: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Computes the logits, or with targets the mean loss.

        Args:
            tokens: (B, T) int64, T at most the context.
            targets: (B, T) int64, -100 where no loss is wanted.
            cache: keys and values of earlier tokens, in evaluation; the new ones are added to it.
            last: (B,) int64, index of the one token in each row whose logits are wanted.

        Returns:
            Tensor: logits (B, T, V), with `last` (B, 1, V), or with targets the mean loss (), fp32,
                in nats.

        Raises:
            UserError: there are more tokens than the context. On CPUs without targets also if they
                are no ids of the vocabulary; elsewhere that would need a sync.

        >>> model = fastgpt.GPT.from_config(num_layers=1, num_heads=2, dim=16, vocab_size=50)
        >>> tokens = torch.zeros(1, 10, dtype=torch.long)
        >>> model(tokens, targets=tokens).dtype
        torch.float32
        """
        assert cache is None or not self.training
        plain = type(tokens) is Tensor and not torch.compiler.is_compiling()
        if targets is None and plain and tokens.is_cpu:  # their loader checks those of a loss
            check_tokens(tokens, self.config)
        T, context = tokens.shape[1], self.config.context
        if context < T:
            raise UserError(f"{T} tokens are longer than the model's context, {context}")
        alone = self.cp_shard is not None or is_batch_invariant()
        if alone and targets is None and cache is None:
            # logits are of whole sequences, and a rank may want them alone: a cache needs no other
            # rank, and gives the bits of generation
            cache = Cache(self.config, len(tokens), T, tokens.device)
        positions = slice(T) if cache is None else cache.begin(tokens)
        doc_ids, weight = None, None
        if self.config.document_mask:
            doc_ids = (tokens == self.config.eot_id).cumsum(1)  # (B, T), equal in a document
        if self.cp_shard is not None and cache is None:
            positions = self.cp_shard.positions(T, tokens.device)
            tokens = tokens[:, positions]
            if targets is not None:
                targets, weight = self.cp_shard.targets(targets, positions)
        x = self.wte(tokens)  # (B, T, C)
        x = self.dropout(x if self.wpe is None else self.wpe(x, positions))
        if self.residual_dtype == autocast_dtype(x):
            x = x.to(self.residual_dtype)
        cos_sin = None if self.rotary is None else self.rotary(positions)
        residual = None
        for i, block in enumerate(self.h):
            x, residual = block(x, residual, cos_sin, doc_ids, cache and cache.layers[i])
        if self.ln_f is not None:
            x, _ = self.ln_f(x, residual)
        out = self.head(_tokens_at(x, last), targets)
        return out if weight is None else out * weight

    def head(self, x: Tensor, targets: Tensor | None) -> Tensor:
        """Computes logits or loss, as `forward`, from the normalised activations x (B, T, C)."""
        weight, bias = self.wte.weight, None
        if self.lm_head is not None:
            weight, bias = self.lm_head.weight, self.lm_head.bias
        options: dict[str, Any] = {
            "bias": bias, "softcap": self.config.softcap, "valid_vocab": self.config.vocab_size,
        }  # fmt: skip
        if targets is None:
            return head_logits(x, weight, **options)
        if self.training:
            options["z_loss"] = self.z_loss
        return self.ops.loss(x, weight, targets, **options)

    def num_params(self) -> int:
        """Counts the parameters, without the padding of the vocabulary."""
        padding = self.config.padded_vocab - (self.config.vocab_size or 0)
        return sum(
            weight.numel() - (padding * weight.shape[1:].numel() if name in VOCAB_TABLES else 0)
            for name, weight in self.named_parameters()
        )


VOCAB_TABLES = ("wte.weight", "lm_head.weight", "lm_head.bias")
"""The parameters with a row for each token of the padded vocabulary."""


def _tokens_at(x: Tensor, last: Tensor | None) -> Tensor:
    """Returns one token of each row: logits of all may need more memory than the model."""
    return x if last is None else x[torch.arange(len(x), device=x.device), last][:, None]


def _cut_padding(model: nn.Module, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    assert isinstance(model, GPT)
    for name in VOCAB_TABLES:
        if prefix + name in state:
            state[prefix + name] = state[prefix + name][: model.config.vocab_size]


def restore_padding(model: nn.Module, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Pads the vocabulary of weights that were saved without its padding, in place."""
    assert isinstance(model, GPT)
    for name in VOCAB_TABLES:
        table = state.get(prefix + name)
        if table is not None and table.shape[0] == model.config.vocab_size:
            missing = model.config.padded_vocab - table.shape[0]
            state[prefix + name] = F.pad(table, (0, 0) * (table.dim() - 1) + (0, missing))


# --- positions ------------------------------------------------------------------------------------


class LearnedPositions(nn.Module):
    """Adds a trained vector for each position to x (B, T, C)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(config.context, config.dim))  # as nn.Embedding

    def forward(self, x: Tensor, positions: slice | Tensor) -> Tensor:
        return x + local(self.weight)[positions]


class SinusoidalPositions(nn.Module):
    """Adds fixed sines, then cosines, to x (B, T, C): section 3.5 of Vaswani et al. 2017."""

    waves: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        angles = _angles(config.context, _frequencies(config.dim, 10_000.0))  # (context, C/2)
        self.register_buffer("waves", torch.cat((angles.sin(), angles.cos()), -1), persistent=False)

    def forward(self, x: Tensor, positions: slice | Tensor) -> Tensor:
        return x + self.waves[positions]


class Rotary(nn.Module):
    """Computes the cosines and sines of the angles by which queries and keys are rotated.

    Each is (T, D/2), or (B T, D/2) for positions (B, T), one row after the other.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        frequencies = _frequencies(config.head_dim, config.rotary_base)
        if config.rotary_scaling is not None:
            frequencies = _lowered(frequencies, *config.rotary_scaling)
        angles = _angles(config.context, frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, positions: slice | Tensor) -> tuple[Tensor, Tensor]:
        return self.cos[positions].flatten(0, -2), self.sin[positions].flatten(0, -2)


def _frequencies(width: int, base: float) -> Tensor:
    return base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)


def _lowered(frequencies: Tensor, factor: float, low: float, high: float, context: int) -> Tensor:
    """Divides frequencies with fewer than `low` turns in the context by `factor`, and those with
    more than `high` turns by 1; in between, the inverse of the divisor is interpolated.

    Llama 3.1's scaling: Grattafiori et al. 2024, "The Llama 3 Herd of Models", and its published
    code.
    """
    turns = context * frequencies / (2 * torch.pi)
    unscaled = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (unscaled + (1 - unscaled) / factor)


def _angles(T: int, frequencies: Tensor) -> Tensor:
    return torch.outer(torch.arange(T, dtype=torch.float64), frequencies).float()


POSITIONS = {"learned": LearnedPositions, "sinusoidal": SinusoidalPositions}
"""Encodings that are added; others are not."""
