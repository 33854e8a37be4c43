"""Building a model: the GPT, or one of the lecture's steps before it, from the GPT's own parts.

A   Bigram         row t of one V x V table holds the logits of what follows token t
B   LectureBlock   token and position embeddings, one attention head, a linear output
C   LectureBlock   several heads side by side
D   LectureBlock   a linear layer with a ReLU after the heads
E   LectureBlock   attention and MLP with residual connections, so that blocks can be stacked
F   block.Block    LayerNorm before each of them and at the end: `layernorm`, and then `gpt`

The recipes `lecture-bigram`, `-head`, `-multihead`, `-feedforward`, `-residual`, `-layernorm` and
`-gpt` train them; docs/reproduction.md has the loss of each.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from fastgpt.config.model import ModelConfig
from fastgpt.errors import UserError
from fastgpt.model.block import MLP, Attention
from fastgpt.model.gpt import GPT
from fastgpt.ops.protocols import Ops
from fastgpt.ops.torch_ops import cross_entropy


class Bigram(GPT):
    """A GPT with no layers, no positions and no head: its embeddings are the logits."""

    def __init__(self, config: ModelConfig, ops: Ops, **options: Any) -> None:
        width = {"dim": config.vocab_size, "vocab_multiple": 1}  # lookups gain nothing from padding
        bare = replace(config, num_layers=0, num_heads=1, num_kv_heads=None, **width)
        bare = replace(bare, position="none", tied=True, bias=False)
        super().__init__(bare, ops, **options)

    def head(self, x: Tensor, targets: Tensor | None) -> Tensor:
        if targets is None:
            return x
        return cross_entropy(x, targets, self.z_loss if self.training else 0.0)


class LectureBlock(nn.Module):
    """Attention of several heads (B, C), then a linear layer (D), or an MLP and sums (E)."""

    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        super().__init__()
        self.kind, self.attn = config.architecture, Attention(config, ops)
        if self.kind == "residual":
            self.mlp = MLP(config, ops)
            return
        self.attn.add_module("c_proj", nn.Identity())  # the heads' outputs are left side by side
        if self.kind == "feedforward":
            self.mlp = nn.Sequential(nn.Linear(config.dim, config.dim), nn.ReLU())

    def forward(self, x: Tensor, residual: None, *rest: Any) -> tuple[Tensor, None]:
        y = self.attn(x, *rest)
        if self.kind == "heads":
            return y, None
        if self.kind == "feedforward":
            return self.mlp(y), None
        x = x + y
        return x + self.mlp(x), None


class Unnormalised(GPT):
    """GPT without normalisation layers: the lecture's steps B to E."""

    def block(self, config: ModelConfig, ops: Ops) -> nn.Module:
        return LectureBlock(config, ops)


NORMS = "norm norm_eps"
FEED_FORWARD = "activation ffn_dim"
ATTENTION = "num_kv_heads qk_norm rotary_scaling window document_mask"
REST = "position softcap dropout"
LACKS = {
    "bigram": f"{NORMS} {FEED_FORWARD} {ATTENTION} {REST}",
    "heads": f"{NORMS} {FEED_FORWARD}",
    "feedforward": f"{NORMS} {FEED_FORWARD}",
    "residual": NORMS,
}
"""Options that have no effect in each architecture."""


def build_model(config: ModelConfig, ops: Ops, **options: Any) -> GPT:
    """Builds the network that `config.architecture` names; the arguments are those of `GPT`.

    Raises:
        UserError: an option is set that has no effect in this network.

    >>> config = fastgpt.ModelConfig(architecture="bigram", activation="relu", vocab_size=50)
    >>> from fastgpt.ops import select
    >>> ops = select(fastgpt.OpsConfig(), "cpu")
    >>> fastgpt.build_model(config, ops).num_params()
    2500
    """
    if config.is_gpt:
        return GPT(config, ops, **options)
    plain, without = ModelConfig(activation="relu"), f"model.architecture {config.architecture}"
    names = LACKS[config.architecture].split()
    set_to = [(f"model.{name}", getattr(config, name), getattr(plain, name)) for name in names]
    set_to.append(("--train.recompute", options.get("recompute", "none"), "none"))
    for name, given, expected in set_to:
        if given != expected:
            said = f"it has no effect in {without}, expected {expected}"
            raise UserError(f"{name} is {given}: {said}")
    kind = Bigram if config.architecture == "bigram" else Unnormalised
    return kind(config, ops, **options)
