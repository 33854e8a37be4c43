"""Blocks of a GPT, and the layers they are built of: dropout, projections, norms, attention, MLP.

Shapes
    B batch, T tokens, C width, H query heads, K key/value heads, D head dim, F feed-forward width
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastgpt.config.config import Recompute
from fastgpt.config.model import ModelConfig
from fastgpt.kernels import is_batch_invariant
from fastgpt.kernels.bias_act.op import activation
from fastgpt.model.context_split import ContextShard
from fastgpt.ops.dtensor import embedding, linear, local
from fastgpt.ops.kv_cache import LayerCache
from fastgpt.ops.protocols import Ops


class Dropout(nn.Module):
    """Dropout with probability p in training; the identity in evaluation or if p is 0."""

    def __init__(self, p: float, ops: Ops) -> None:
        super().__init__()
        self.p, self.ops = p, ops

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.dropout(x, self.p) if self.training and self.p else x


class Embedding(nn.Embedding):
    """Embedding of tokens; each tensor-parallel rank has a part of the vocabulary."""

    def forward(self, input: Tensor) -> Tensor:
        return embedding(input, self.weight)


class Projection(nn.Linear):
    """Linear layer; with `skip_bias_add` the next op adds the bias, `skipped_bias`, instead.

    That op computes the bias's gradient together with the output's: no pass of its own is needed.
    """

    def __init__(
        self, inputs: int, outputs: int, *, bias: bool, skip_bias_add: bool = False
    ) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.skip_bias_add = skip_bias_add

    @property
    def skipped_bias(self) -> Tensor | None:
        return local(self.bias) if self.skip_bias_add else None

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, None if self.skip_bias_add else self.bias)


class Residual(NamedTuple):
    """Residual stream, and the bias that the `Projection` before it left out."""

    stream: Tensor
    x_bias: Tensor | None


class Norm(nn.Module):
    """LayerNorm or RMSNorm with the residual sum before it.

    Returns (norm(sum), sum), the sum of x, its bias and the residual stream; without a residual,
    x stands for the sum.
    """

    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        super().__init__()
        self.ops, self.eps, self.kind = ops, config.epsilon, config.norm_kind
        self.weight = nn.Parameter(torch.ones(config.dim))
        if self.kind == "layernorm":
            self.bias = nn.Parameter(torch.zeros(config.dim)) if config.bias_at("mlp") else None

    def forward(self, x: Tensor, residual: Residual | None) -> tuple[Tensor, Tensor]:
        norms, weight = self.ops.norms, local(self.weight)
        norm, add_norm, parameters = norms.rms_norm, norms.add_rms_norm, (weight,)
        if self.kind == "layernorm":
            norm, add_norm = norms.layer_norm, norms.add_layer_norm
            parameters = weight, local(self.bias)
        if residual is None:
            return norm(x, *parameters, self.eps), x
        stream, x_bias = residual
        return add_norm(x, stream, *parameters, self.eps, x_bias=x_bias)


class HeadNorm(nn.RMSNorm):
    """RMSNorm of heads (..., D), which keeps their dtype; each tensor-parallel rank has some heads.

    It computes in the dtype of the weights, if there are any: two dtypes, as under autocast, have
    no fused kernel.
    """

    def __init__(self, config: ModelConfig) -> None:
        eps = 1e-6 if config.norm_eps is None else config.norm_eps
        super().__init__(config.head_dim, eps, config.qk_norm == "weighted")

    def forward(self, x: Tensor) -> Tensor:
        weight = None if self.weight is None else local(self.weight, partial=True)
        given = x if weight is None else x.to(weight.dtype)
        y = nn.functional.rms_norm(given, self.normalized_shape, weight, self.eps)
        return y.type_as(x)  # autocast may use fp32


class Attention(nn.Module):
    """Causal self-attention; q, k and v are views of one packed projection, never copied."""

    def __init__(
        self, config: ModelConfig, ops: Ops, cp_shard: ContextShard | None = None, *,
        skip_bias_add: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        H, K, D, C = config.num_heads, config.kv_heads, config.head_dim, config.dim
        self.ops, self.cp_shard = ops, cp_shard
        self.heads: tuple[int, ...] = (H, K, K)
        self.head_dim = D
        self.scale, self.window = config.attention_scale, config.window
        self.p = config.dropout_at("attention")
        self.q_norm, self.k_norm = (HeadNorm(config) if config.qk_norm else None for _ in range(2))
        as_projected = not config.qk_norm and config.position != "rotary" and cp_shard is None
        self.attention_packed = ops.attention_packed if as_projected else None
        self.c_attn = Projection(C, (H + 2 * K) * D, bias=config.bias_at("qkv"))
        bias = config.bias_at("projection")
        self.c_proj = Projection(H * D, C, bias=bias, skip_bias_add=skip_bias_add)
        self.dropout = Dropout(config.dropout_at("residual"), ops)

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        """Computes (B, T, C) from x (B, T, C); `attend` explains the other arguments."""
        return self.output(self.attend(self.projected(x), *rest))

    def projected(self, x: Tensor) -> Tensor:
        """Projects x (B, T, C) to queries, keys and values (B, T, H + 2 K, D)."""
        return self.c_attn(x).unflatten(-1, (-1, self.head_dim))

    def output(self, y: Tensor) -> Tensor:
        """Projects the heads' outputs y (B, T, H, D) back to (B, T, C)."""
        return self.dropout(self.c_proj(y.flatten(2)))

    def attend(
        self, qkv: Tensor, cos_sin: tuple[Tensor, Tensor] | None, doc_ids: Tensor | None,
        layer_cache: LayerCache | None,
    ) -> Tensor:  # fmt: skip
        """Computes the heads' outputs (B, T, H, D) from qkv (B, T, H + 2 K, D)."""
        p = self.p if self.training else 0.0
        options = {"scale": self.scale, "window": self.window, "dropout_p": p, "doc_ids": doc_ids}
        if self.attention_packed is not None and layer_cache is None:
            return self.attention_packed(qkv, self.heads[0], **options)
        q, k, v = qkv.split(self.heads, dim=2)  # (B, T, H, D), (B, T, K, D) twice
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if cos_sin is not None:
            q, k = self.rotate(q, k, *cos_sin)
        if layer_cache is not None:
            layer_cache.extend(k, v)
            # first tokens and later ones get the same bits from the same op only
            if not layer_cache.cache.fresh or is_batch_invariant():
                return self.ops.decode(q, *layer_cache.read(), layer_cache.cache, scale=self.scale)
        attention = self.ops.attention
        if self.cp_shard is not None and layer_cache is None:
            attention = partial(self.cp_shard.attend, attention)
        return attention(q, k, v, **options)

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotates q and k by the angles of T positions, or of B T if each row has its own."""
        if len(cos) == q.shape[1]:
            return self.ops.rotary(q, k, cos, sin)
        q_row, k_row = (t.flatten(0, 1)[None] for t in (q, k))  # all rows as a single long one
        q_row, k_row = self.ops.rotary(q_row, k_row, cos, sin)
        return q_row.reshape(q.shape), k_row.reshape(k.shape)


class MLP(nn.Module):
    """Feed-forward layers C -> F -> C; SwiGLU's gate is the first half of a 2 F wide projection."""

    def __init__(self, config: ModelConfig, ops: Ops, *, skip_bias_add: bool = False) -> None:
        super().__init__()
        self.ops, self.activation = ops, config.activation
        C, F, bias = config.dim, config.ffn_width, config.bias_at("mlp")
        width = 2 * F if config.activation == "swiglu" else F
        self.c_fc = Projection(C, width, bias=bias, skip_bias_add=ops.activation is not None)
        self.c_proj = Projection(F, C, bias=bias, skip_bias_add=skip_bias_add)
        self.dropout = Dropout(config.dropout_at("feed_forward"), ops)

    def forward(self, x: Tensor) -> Tensor:
        y = self.c_fc(x)
        if self.ops.activation is None:
            y = activation(y, self.activation)
        else:  # a kernel that adds the bias as well
            y = self.ops.activation(y, self.c_fc.skipped_bias, self.activation)
        return self.dropout(self.c_proj(y))  # (B, T, F) to (B, T, C)


class Block(nn.Module):
    """Transformer block: attention and feed-forward, each added to the residual stream.

    With pre-norm (GPT-2), `x` is the output of the last sub-layer, not yet added to `residual`, so
    that each sum and the normalisation after it are one op. With post-norm (the transformer of
    2017), x = norm(x + attn(x)), then x = norm(x + mlp(x)), and the residual returned is None.

    With `recompute` the backward computes activations again instead of keeping them: all of the
    block (full), or what comes before and after its attention (selective).
    """

    def __init__(
        self, config: ModelConfig, ops: Ops, recompute: Recompute = "none",
        cp_shard: ContextShard | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.recompute = recompute
        self.pre_norm = config.pre_norm
        self.ln_1 = Norm(config, ops)
        # a norm adds the bias of the projection before it, unless dropout comes in between
        self.attn = Attention(
            config, ops, cp_shard, skip_bias_add=not config.dropout_at("residual")
        )
        self.ln_2 = Norm(config, ops)
        self.mlp = MLP(config, ops, skip_bias_add=not config.dropout_at("feed_forward"))

    def forward(
        self, x: Tensor, residual: Residual | None, *rest: Any
    ) -> tuple[Tensor, Residual | None]:
        """Computes the block; `Attention.attend` explains the other arguments."""
        x, total = self.call("full", self.run, x, *(residual or (None, None)), *rest)
        if total is None:
            return x, None
        bias = self.mlp.c_proj.skipped_bias
        # a copy, because FSDP frees this block's parameters before the next block adds the bias
        return x, Residual(total, None if bias is None else bias.clone())

    def run(
        self, x: Tensor, stream: Tensor | None, x_bias: Tensor | None, *rest: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Computes the block: its output, and with pre-norm the residual stream."""
        qkv, total = self.call("selective", self.pre_attention, x, stream, x_bias)
        return self.call("selective", self.post_attention, self.attn.attend(qkv, *rest), total)

    def call(self, recomputed: Recompute, part: Callable[..., Any], *inputs: Any) -> Any:
        """Calls a part of the block, which keeps its inputs alone if it is to be recomputed."""
        if self.training and self.recompute == recomputed:
            return checkpoint(part, *inputs, use_reentrant=False)
        return part(*inputs)

    def pre_attention(
        self, x: Tensor, stream: Tensor | None, x_bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Computes queries, keys and values, and what the attention's output is added to."""
        total = x
        if self.pre_norm:
            x, total = self.ln_1(x, None if stream is None else Residual(stream, x_bias))
        return self.attn.projected(x), total

    def post_attention(self, y: Tensor, total: Tensor) -> tuple[Tensor, Tensor | None]:
        """Computes the rest of the block from the heads' outputs y (B, T, H, D)."""
        x, residual = self.attn.output(y), Residual(total, self.attn.c_proj.skipped_bias)
        if self.pre_norm:
            x, total = self.ln_2(x, residual)
            return self.mlp(x), total
        x, _ = self.ln_1(x, residual)
        x, _ = self.ln_2(self.mlp(x), Residual(x, self.mlp.c_proj.skipped_bias))
        return x, None
