"""Tiny models."""

from dataclasses import replace

import torch
from torch import Tensor

from fastgpt.config.config import OpsConfig
from fastgpt.config.model import ModelConfig
from fastgpt.config.recipes import RECIPES
from fastgpt.model.build import build_model
from fastgpt.model.gpt import GPT
from fastgpt.ops import tables
from fastgpt.ops.protocols import Ops

TINY = ModelConfig(num_layers=2, num_heads=4, dim=32, context=16, vocab_size=50)
OPTIONS = {
    "gpt2": {},
    "rmsnorm": {"norm": "rmsnorm"},
    "post-norm": {"norm": "post-layernorm"},
    "no-bias": {"bias": False},
    "gelu-erf": {"activation": "gelu_erf"},
    "relu": {"activation": "relu"},
    "relu-squared": {"activation": "relu_squared"},
    "swiglu": {"activation": "swiglu"},
    "ffn-dim": {"ffn_dim": 40},
    "sinusoidal": {"position": "sinusoidal"},
    "rotary": {"position": "rotary", "rotary_base": 100.0},
    "no-positions": {"position": "none"},
    "grouped-heads": {"num_kv_heads": 2},
    "one-kv-head": {"num_kv_heads": 1},
    "qk-norm": {"qk_norm": True},
    "untied": {"tied": False},
    "softcap": {"softcap": 3.0},
    "window": {"window": 3},
    "modern": {
        "norm": "rmsnorm", "bias": False, "activation": "swiglu", "position": "rotary", "window": 5,
        "num_kv_heads": 2, "qk_norm": True, "tied": False, "softcap": 15.0,
    },
    "original": {
        "norm": "post-layernorm", "activation": "relu", "position": "sinusoidal", "qk_norm": True,
    },
}  # fmt: skip


def on_cpu(**asked: str) -> Ops:
    """Returns the ops of an uncompiled model on a CPU."""
    return tables.select(OpsConfig(**asked), "cpu")  # pyright: ignore


def build(*, attention: str = "torch", chosen: Ops | None = None, **options) -> GPT:
    """Builds a tiny model whose every parameter matters: none is 0 or 1, attention is uneven."""
    model = initial(chosen=chosen or on_cpu(attention=attention), **options)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn_like(weight)
            weight.copy_(0.4 * noise if weight.dim() == 2 else noise / 5 + 0.9)
    model.load_state_dict(model.state_dict())  # what was drawn above is no padding: that is 0
    return model


def initial(config: ModelConfig = TINY, *, chosen: Ops | None = None, **options) -> GPT:
    """Builds a model before training."""
    return build_model(replace(config, **options), chosen or on_cpu())


def shrunk(name: str) -> ModelConfig:
    """Returns a recipe's settings with a smaller network and the same options."""
    model = RECIPES[name][1].model
    if model.dim > 64:
        model = replace(model, num_layers=2, num_heads=2, dim=64, context=16)
    no_dropout = {name: 0.0 for name in ModelConfig.__slots__ if name.endswith("dropout")}
    return replace(model, vocab_size=65, document_mask=False, **no_dropout)


def sharp(noise: float = 0.3, **options) -> GPT:
    """Builds a model in evaluation mode whose predictions are far from uniform.

    GPT-2's initial weights hardly distinguish tokens, and attend to all of them alike.
    """
    model = initial(**options)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=noise)
    return model.eval()


def draw_tokens(B: int = 2, T: int = 16, V: int = 50) -> Tensor:
    return torch.randint(V, (B, T))


def greedy(model: GPT, prompt: Tensor, new: int) -> list[int]:
    """Continues the prompt by `new` tokens, computed from the whole window at each step."""
    row = prompt.tolist()
    for _ in range(new):
        window = torch.tensor([row[-model.config.context :]])
        row.append(int(model(window)[0, -1].argmax()))
    return row
