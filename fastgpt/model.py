"""GPT-2, and what has been changed in it since, as options chosen when the model is built.

Shapes
    B batch, T tokens, C width, H query heads, K key/value heads, D head dim, F feed-forward width,
    V vocabulary
Source
    Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"; parameter names are
    GPT-2's.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from torch import Tensor, nn

from fastgpt import ops as op
from fastgpt.cache import Cache, LayerCache
from fastgpt.config import ModelConfig
from fastgpt.ops import Ops
from fastgpt.positions import POSITIONS, Rotary


class Dropout(nn.Module):
    """Dropout through the chosen implementation; nothing at all in evaluation or where p is 0."""

    def __init__(self, p: float, ops: Ops) -> None:
        super().__init__()
        self.p, self.op = p, ops.dropout

    def forward(self, x: Tensor) -> Tensor:
        return self.op(x, self.p) if self.training and self.p else x


class LayerNorm(nn.Module):
    """(norm(x + residual), x + residual); without a residual, x stands for the sum."""

    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        super().__init__()
        self.op = ops.norms
        self.weight = nn.Parameter(torch.ones(config.dim))
        self.bias = nn.Parameter(torch.zeros(config.dim)) if config.bias else None

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if residual is None:
            return self.op.layer_norm(x, self.weight, self.bias, 1e-5), x
        return self.op.add_layer_norm(x, residual, self.weight, self.bias, 1e-5)


class RMSNorm(nn.Module):
    """As `LayerNorm`, by the root mean square alone; it has no bias."""

    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        super().__init__()
        self.op = ops.norms
        self.weight = nn.Parameter(torch.ones(config.dim))

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if residual is None:
            return self.op.rms_norm(x, self.weight, 1e-6), x
        return self.op.add_rms_norm(x, residual, self.weight, 1e-6)


NORMS = {"layernorm": LayerNorm, "rmsnorm": RMSNorm}


class Attention(nn.Module):
    """Causal self-attention; q, k and v are views of one packed projection, never copied."""

    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        super().__init__()
        H, K, D, C = config.num_heads, config.kv_heads, config.head_dim, config.dim
        self.heads = (H, K, K)
        self.head_dim = D
        qkv_bias, bias = config.qkv_bias, config.projection_bias
        self.c_attn = nn.Linear(
            C, (H + 2 * K) * D, bias=config.bias if qkv_bias is None else qkv_bias
        )
        self.c_proj: nn.Module = nn.Linear(H * D, C, bias=config.bias if bias is None else bias)
        self.scale = config.attention_scale
        self.qk_norm = config.qk_norm
        self.op, self.window, self.p = ops.attention, config.window, config.dropout_at("attention")
        self.rotary = ops.rotary
        turned = config.qk_norm or config.position == "rotary"
        self.packed = None if turned else ops.attention_packed
        self.decode = ops.decode
        self.dropout = Dropout(config.dropout_at("residual"), ops)

    def forward(
        self,
        x: Tensor,
        turn: tuple[Tensor, Tensor] | None,
        doc_ids: Tensor | None,
        past: LayerCache | None,
    ) -> Tensor:
        qkv = self.c_attn(x).unflatten(-1, (-1, self.head_dim))  # (B, T, H + 2 K, D)
        p = self.p if self.training else 0.0
        if self.packed is not None and past is None:
            y = self.packed(
                qkv,
                self.heads[0],
                scale=self.scale,
                window=self.window,
                dropout_p=p,
                doc_ids=doc_ids,
            )  # (B, T, H, D)
            return self.dropout(self.c_proj(y.flatten(2)))
        q, k, v = qkv.split(self.heads, dim=2)  # (B, T, H, D), (B, T, K, D) twice
        if self.qk_norm:
            # autocast may normalise in fp32
            q, k = (F.rms_norm(t, (self.head_dim,), eps=1e-6).type_as(v) for t in (q, k))
        if turn is not None and past is None:
            q, k = self.rotary(q, k, *turn)
        elif turn is not None:  # rows stand at places of their own: as one row of them all
            turned = self.rotary(q.flatten(0, 1)[None], k.flatten(0, 1)[None], *turn)
            q, k = (x.reshape(y.shape) for x, y in zip(turned, (q, k)))
        if past is not None:
            keys, values = past.extend(k, v)
            if not past.cache.fresh:
                cache = past.cache
                y = self.decode(
                    q, keys, values, cache.lengths, starts=cache.starts, scale=self.scale
                )
                return self.c_proj(y.flatten(2))
        y = self.op(
            q, k, v, scale=self.scale, window=self.window, dropout_p=p, doc_ids=doc_ids
        )  # (B, T, H, D)
        return self.dropout(self.c_proj(y.flatten(2)))  # (B, T, C)


class MLP(nn.Module):
    """Feed-forward: C -> F -> C; SwiGLU's gate is the first half of a 2 F wide projection."""

    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        super().__init__()
        width = config.ffn_width * (2 if config.activation == "swiglu" else 1)
        self.c_fc = nn.Linear(config.dim, width, bias=config.bias)
        self.c_proj = nn.Linear(config.ffn_width, config.dim, bias=config.bias)
        self.op, self.kind = ops.activation, config.activation
        self.dropout = Dropout(config.dropout_at("feed_forward"), ops)

    def forward(self, x: Tensor) -> Tensor:
        y = self.op(x, self.c_fc, self.kind)  # (B, T, F)
        return self.dropout(self.c_proj(y))  # (B, T, C)


class PreNormBlock(nn.Module):
    """GPT-2's block.

    `x` is what the last sub-layer put out and has yet to join the `residual` stream, so that each
    sum and the normalisation after it are one op.
    """

    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        super().__init__()
        self.ln_1 = NORMS[config.norm](config, ops)
        self.attn = Attention(config, ops)
        self.ln_2 = NORMS[config.norm](config, ops)
        self.mlp = MLP(config, ops)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        turn: tuple[Tensor, Tensor] | None,
        doc_ids: Tensor | None,
        past: LayerCache | None,
    ) -> tuple[Tensor, Tensor | None]:
        y, residual = self.ln_1(x, residual)
        y, residual = self.ln_2(self.attn(y, turn, doc_ids, past), residual)
        return self.mlp(y), residual


class PostNormBlock(PreNormBlock):
    """The 2017 transformer's block: x = norm(x + attn(x)), then x = norm(x + mlp(x))."""

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        turn: tuple[Tensor, Tensor] | None,
        doc_ids: Tensor | None,
        past: LayerCache | None,
    ) -> tuple[Tensor, Tensor | None]:
        x, _ = self.ln_1(self.attn(x, turn, doc_ids, past), x)
        x, _ = self.ln_2(self.mlp(x), x)
        return x, None


class GPT(nn.Module):
    """Tokens in, logits or loss out; `build_model` makes one.

    Args:
        config: `vocab_size` must be set.
        ops: from `fastgpt.ops.select`.
    """

    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        super().__init__()
        assert config.vocab_size is not None
        assert config.eot_id is not None or not config.document_mask
        self.config = config
        self.wte = nn.Embedding(config.padded_vocab, config.dim)
        self.wpe = POSITIONS[config.position](config)
        self.rotary = Rotary(config) if config.position == "rotary" else None
        self.dropout = Dropout(config.dropout_at("embedding"), ops)
        self.h = nn.ModuleList(self.block(config, ops) for _ in range(config.num_layers))
        self.ln_f = self.last_norm(config, ops)
        self.loss = ops.loss
        self.lm_head = None
        if not config.tied:
            self.lm_head = nn.Linear(config.dim, config.padded_vocab, bias=config.head_bias)
        self._init_weights()
        self.register_state_dict_post_hook(_cut_padding)
        self.register_load_state_dict_pre_hook(_restore_padding)

    def block(self, config: ModelConfig, ops: Ops) -> nn.Module:
        """One of the layers."""
        return (PreNormBlock if config.norm_position == "pre" else PostNormBlock)(config, ops)

    def last_norm(self, config: ModelConfig, ops: Ops) -> nn.Module | None:
        """What normalises the residual stream before the head."""
        return NORMS[config.norm](config, ops) if config.norm_position == "pre" else None

    def _init_weights(self) -> None:
        init = self.config.init
        if init != "torch":
            for name, weight in self.named_parameters():
                if weight.dim() == 2:
                    scaled = init == "gpt2" and name.endswith("c_proj.weight")
                    depth = 2 * self.config.num_layers if scaled else 1
                    nn.init.normal_(weight, std=0.02 / math.sqrt(depth))
                elif name.endswith("bias"):
                    nn.init.zeros_(weight)
        with torch.no_grad():
            for table in self._vocab_tables():
                table[self.config.vocab_size :] = 0

    def _vocab_tables(self) -> list[Tensor]:
        """Whatever has a row for each token of the padded vocabulary."""
        return [self.wte.weight, *([] if self.lm_head is None else self.lm_head.parameters())]

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, cache: Cache | None = None
    ) -> Tensor:
        """Runs the network.

        Args:
            tokens: (B, T) int64, T at most the context.
            targets: (B, T) int64, -100 where no loss is wanted.
            cache: what came before the tokens, in evaluation; they are added to it.

        Returns:
            Tensor: logits (B, T, V), or with targets the mean loss (), fp32, in nats.
        """
        assert cache is None or not self.training
        places = slice(tokens.shape[1]) if cache is None else cache.begin(tokens)
        x = self.dropout(self.wpe(self.wte(tokens), places))  # (B, T, C)
        turn = None
        if self.rotary is not None:
            turn = self.rotary(places.flatten() if isinstance(places, Tensor) else places)
        residual = doc_ids = None
        if self.config.document_mask:
            doc_ids = (tokens == self.config.eot_id).cumsum(1)  # (B, T), as attention wants them
        for i, block in enumerate(self.h):
            past = None if cache is None else cache.layers[i]
            x, residual = block(x, residual, turn, doc_ids, past)
        if self.ln_f is not None:
            x, _ = self.ln_f(x, residual)
        return self.head(x, targets)

    def head(self, x: Tensor, targets: Tensor | None) -> Tensor:
        """Logits or loss, as `forward`, from the normalised residual stream x (B, T, C)."""
        weight = self.wte.weight if self.lm_head is None else self.lm_head.weight
        bias = None if self.lm_head is None else self.lm_head.bias
        V, softcap = self.config.vocab_size, self.config.softcap
        assert V is not None
        if targets is None:
            return op.head_logits(x, weight, bias=bias, valid_vocab=V, softcap=softcap)
        return self.loss(x, weight, targets, bias=bias, valid_vocab=V, softcap=softcap)

    def num_params(self) -> int:
        """Trained numbers; the padding of the vocabulary is left out."""
        return sum(tensor.numel() for tensor in dict(self.state_dict()).values())


VOCAB_TABLES = ("wte.weight", "lm_head.weight", "lm_head.bias")


def _cut_padding(model: nn.Module, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    assert isinstance(model, GPT)
    for name in VOCAB_TABLES:
        if prefix + name in state:
            state[prefix + name] = state[prefix + name][: model.config.vocab_size]


def _restore_padding(model: nn.Module, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    assert isinstance(model, GPT)
    for name in VOCAB_TABLES:
        table = state.get(prefix + name)
        if table is not None and table.shape[0] == model.config.vocab_size:
            missing = model.config.padded_vocab - table.shape[0]
            state[prefix + name] = F.pad(table, (0, 0) * (table.dim() - 1) + (0, missing))
