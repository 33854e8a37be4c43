"""Models in nanoGPT's `ckpt.pt`: a dictionary that PyTorch writes, read without running pickles."""

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastgpt.config import ModelConfig
from fastgpt.convert.family import PLAIN_GPT2_NEEDS, check_expressed
from fastgpt.errors import UserError, writing

PREFIX = "_orig_mod."
"""What torch.compile puts before the names of tensors."""
NEEDS = PLAIN_GPT2_NEEDS | {"activation": ("gelu_erf",)}


def read_nanogpt(path: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Reads a checkpoint: (settings, weights under our names).

    Raises:
        UserError: it is no checkpoint of nanoGPT, or a tensor is missing or unknown.
    """
    try:
        saved = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
        args, state = saved["model_args"], saved["model"]
        config = ModelConfig(
            num_layers=args["n_layer"],
            num_heads=args["n_head"],
            dim=args["n_embd"],
            context=args["block_size"],
            vocab_size=args["vocab_size"],
            bias=args["bias"],
            dropout=args.get("dropout", 0.0),
            activation="gelu_erf",
        )
    except (OSError, RuntimeError, pickle.UnpicklingError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is no checkpoint of nanoGPT, a dictionary with model and model_args: {error}"
        ) from error
    weights = {}
    for stored, x in state.items():
        name = stored.removeprefix(PREFIX).removeprefix("transformer.")
        if not name.endswith(".attn.bias") and name != "lm_head.weight":  # a mask; tied
            weights[name] = x
    return config, weights


def write_nanogpt(config: ModelConfig, weights: dict[str, Tensor], path: Path) -> None:
    """Writes a checkpoint without the optimizer's state.

    Raises:
        UserError: nanoGPT cannot express the model, or the file cannot be written.
    """
    check_expressed("nanoGPT", NEEDS, config)
    state = {f"transformer.{name}": x for name, x in weights.items()}
    args: dict[str, Any] = {
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_embd": config.dim,
        "block_size": config.context,
        "vocab_size": config.vocab_size,
        "bias": config.bias,
        "dropout": config.dropout,
    }
    content = {"model": state | {"lm_head.weight": weights["wte.weight"]}, "model_args": args}
    with writing(path), path.open("wb") as file:
        torch.save(content, file)
