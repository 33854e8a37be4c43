"""Models in nanoGPT's `ckpt.pt`: a dictionary that PyTorch writes, read without running pickles."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastgpt.checkpoint.tensors import unpickle
from fastgpt.config.model import ModelConfig
from fastgpt.convert.family import PLAIN_GPT2_NEEDS, check_expressed
from fastgpt.errors import UserError, brief, reason, shown

PREFIX = "_orig_mod."
"""Prefix that torch.compile puts before the names of tensors."""
MASK = ".attn.bias"
"""End of the name of the causal mask, which old versions of PyTorch needed."""
NEEDS = PLAIN_GPT2_NEEDS | {"activation": ("gelu_erf",)}


def read_nanogpt(path: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Reads a checkpoint: (settings, weights under our names).

    Raises:
        UserError: it is no checkpoint of nanoGPT, or a tensor is missing or unknown.
    """
    try:
        saved = unpickle(path, mmap=True)
        _refuse_nanochat(saved)
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
        named = {_our_name(name): x for name, x in state.items()}
        if not all(isinstance(x, Tensor) and x.is_contiguous() for x in named.values()):
            raise TypeError("model holds something else than whole tensors")
        head = named.pop("lm_head.weight", None)
        tied = head is None or torch.equal(head, named["wte.weight"])
    except (RuntimeError, ValueError, UserError) as error:
        raise UserError(f"{path} is no checkpoint of nanoGPT: {reason(error)}") from error
    except (LookupError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} is no checkpoint of nanoGPT, a dictionary with model and model_args:"
            f" {brief(error)}"
        ) from error
    if not tied:
        raise UserError(f"{path}: lm_head.weight is not wte.weight, as in nanoGPT's models")
    return config, {name: x for name, x in named.items() if not name.endswith(MASK)}


def _our_name(name: str) -> str:
    return name.removeprefix(PREFIX).removeprefix("transformer.")


def _refuse_nanochat(saved: Any) -> None:
    """Raises `UserError` if a checkpoint is nanochat's, or anything but a dictionary."""
    if not isinstance(saved, dict):
        raise UserError(f"it holds {shown(saved)}, not a dictionary with model and model_args")
    short = [name.removeprefix(PREFIX) for name in saved if isinstance(name, str)]
    if any(name.endswith(".attn.c_q.weight") for name in short):
        others = {name.partition(".")[0] for name in short} - {"transformer", "lm_head"}
        has = ", ".join(["a normalised embedding", *sorted(others)])
        raise UserError(f"it is nanochat's, with what fastgpt cannot express: {has}")


def write_nanogpt(config: ModelConfig, weights: Mapping[str, Tensor], path: Path) -> None:
    """Writes a checkpoint without the optimizer's state.

    Raises:
        UserError: nanoGPT cannot express the model.
    """
    check_expressed("nanoGPT", NEEDS, config)
    places = ("embedding", "attention", "residual", "feed_forward")
    dropouts = {config.dropout_at(place) for place in places}
    if len(dropouts) > 1:
        raise UserError(f"nanoGPT cannot express this model: its dropouts are {sorted(dropouts)}")
    state = {f"transformer.{name}": x for name, x in weights.items()}
    state["lm_head.weight"] = state["transformer.wte.weight"]
    args: dict[str, Any] = {
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_embd": config.dim,
        "block_size": config.context,
        "vocab_size": config.vocab_size,
        "bias": config.bias,
        "dropout": dropouts.pop(),
    }
    content = {"model": state, "model_args": args}
    with path.open("wb") as file:
        torch.save(content, file)
