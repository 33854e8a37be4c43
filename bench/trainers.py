"""The trainer that people write: GPT-2 in plain PyTorch, SDPA, AdamW(fused=True), torch.compile.

A peer of fastgpt's training step and nothing else: no options beyond what the recipes of GPT-2 and
of tiny shakespeare use, no kernels of ours. Logits are whole, the loss is F.cross_entropy.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from torch import Tensor, nn

from fastgpt import device
from fastgpt.config import Config, ModelConfig


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each added to the stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        C, bias = config.dim, config.bias
        self.heads, self.dropout = config.num_heads, config.dropout
        self.norm_1, self.norm_2 = nn.LayerNorm(C, bias=bias), nn.LayerNorm(C, bias=bias)
        self.qkv = nn.Linear(C, 3 * C, bias=bias)
        self.out = nn.Linear(C, C, bias=bias)
        self.up = nn.Linear(C, 4 * C, bias=bias)
        self.down = nn.Linear(4 * C, C, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = (
            part.view(B, T, self.heads, C // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm_1(x)).split(C, dim=2)
        )
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        y = self.out(y.transpose(1, 2).reshape(B, T, C))
        x = x + F.dropout(y, p)
        y = self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))
        return x + F.dropout(y, p)


class GPT2(nn.Module):
    """Tokens and targets (B, T) -> mean loss (); head tied to the token embedding."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.padded_vocab, config.dim)
        self.places = nn.Embedding(config.context, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.dim, bias=config.bias)
        self.dropout = config.dropout
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                last = name.endswith(("out.weight", "down.weight"))
                std = 0.02 / (math.sqrt(2 * config.num_layers) if last else 1)
                nn.init.normal_(weight, std=std)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        x = F.dropout(x, self.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def training_step(
    config: Config, on: str, precision: str, batches: Callable[[], tuple[Tensor, Tensor]],
    *, compiled: bool,
) -> Callable[[], None]:  # fmt: skip
    """A step: batch, forward, backward, clipping, fused AdamW.

    Args:
        config: sizes and optimizer settings.
        on: `cpu` or `cuda`.
        precision: of autocast.
        batches: gives x and y, (B, T) each, on the device.
        compiled: torch.compile of model and loss.
    """
    model = GPT2(config.model).to(on)
    loss_of = torch.compile(model) if compiled else model
    optim = config.optim
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": decayed, "weight_decay": optim.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    betas = (optim.beta1, optim.beta2)
    adamw = torch.optim.AdamW(groups, lr=optim.lr, betas=betas, fused=True)

    def step() -> None:
        x, y = batches()
        with device.autocast(on, precision):
            loss = loss_of(x, y)
        loss.backward()
        if optim.grad_clip:
            nn.utils.clip_grad_norm_(model.parameters(), optim.grad_clip)
        adamw.step()
        adamw.zero_grad(set_to_none=True)

    return step
