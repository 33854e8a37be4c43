"""Models in nanoGPT's `ckpt.pt`: a dictionary that PyTorch writes, read without running pickles."""

from pathlib import Path

import torch
from torch import Tensor

from fastgpt.checkpoint.tensors import unpickle
from fastgpt.config.model import ModelConfig
from fastgpt.errors import UserError, brief

PREFIX = "_orig_mod."
"""Prefix that torch.compile puts before the names of tensors."""
MASK = ".attn.bias"
"""End of the name of the causal mask, which old versions of PyTorch needed."""


def read_nanogpt(path: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Reads a checkpoint: (settings, weights under our names).

    Raises:
        UserError: it is no checkpoint of nanoGPT, or a tensor is missing or unknown.
    """
    try:
        saved = unpickle(path, mmap=True)
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
        named = {
            name.removeprefix(PREFIX).removeprefix("transformer."): x for name, x in state.items()
        }
        if not all(isinstance(x, Tensor) and x.is_contiguous() for x in named.values()):
            raise TypeError("model holds something else than whole tensors")
        head = named.pop("lm_head.weight", None)
        tied = head is None or torch.equal(head, named["wte.weight"])
    except (UserError, RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} is no checkpoint of nanoGPT, a dictionary with model and model_args:"
            f" {brief(error)}"
        ) from error
    if not tied:
        raise UserError(f"{path}: lm_head.weight is not wte.weight, as in nanoGPT's models")
    return config, {name: x for name, x in named.items() if not name.endswith(MASK)}
