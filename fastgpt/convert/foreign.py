"""Models of nanoGPT (`ckpt.pt`) and of llm.c (`.bin`).

nanoGPT's is a dictionary that PyTorch writes, read without running pickles. llm.c's has 256
numbers, then all weights of a kind, layer by layer (`train_gpt2.py`, write_model, and
`train_gpt2.cu`, gpt2_build_from_checkpoint, of llm.c).
"""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
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
        UserError: the file is not nanoGPT's, or a tensor is missing or unknown.
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
            f"{path} is not a checkpoint of nanoGPT, a dictionary with model and model_args:"
            f" {brief(error)}"
        ) from error
    if not tied:
        raise UserError(f"{path}: lm_head.weight is not wte.weight, as in nanoGPT's models")
    return config, {name: x for name, x in named.items() if not name.endswith(MASK)}


MAGIC, NUMBERS = 20240326, 256
VERSIONS = {3: torch.float32, 5: torch.bfloat16}
PADDING = 128
"""The vocabulary is padded to a multiple of this."""


def read_llmc(path: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Reads a model file, fp32 (version 3) or bf16 (version 5): (settings, weights by our names).

    Raises:
        UserError: the file is not llm.c's, or is longer or shorter than its sizes say.
    """
    header = np.fromfile(path, "<i4", NUMBERS)
    if len(header) < NUMBERS or header[0] != MAGIC or header[1] not in VERSIONS:
        found = header[:2].tolist()
        raise UserError(
            f"{path} is not a model of llm.c: it begins with {found}, expected {MAGIC} and"
            " version 3 or 5"
        )
    T, V, layers, heads, C, padded = header[2:8].tolist()
    config = ModelConfig(
        num_layers=layers, num_heads=heads, dim=C, context=T, vocab_size=V, activation="gelu_tanh"
    )
    if padded != -(-V // PADDING) * PADDING:
        raise UserError(f"{path} pads {V} tokens to {padded}: expected a multiple of {PADDING}")
    shapes, dtype = dict(_shapes(config, padded)), VERSIONS[int(header[1])]
    sizes = [math.prod(shape) for shape in shapes.values()]
    expected = 4 * NUMBERS + sum(sizes) * dtype.itemsize
    if path.stat().st_size != expected:
        raise UserError(f"{path} has {path.stat().st_size:,} bytes: expected {expected:,}")
    bits = np.memmap(path, f"<u{dtype.itemsize}", "c", offset=4 * NUMBERS)
    parts = torch.from_numpy(bits).view(dtype).split(sizes)
    weights = {name: x.view(shapes[name]) for name, x in zip(shapes, parts)}
    weights["wte.weight"] = weights["wte.weight"][:V]
    return config, weights


def _shapes(config: ModelConfig, padded: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields our name and the shape of each tensor in the order of the file."""
    C = config.dim
    yield "wte.weight", (padded, C)
    yield "wpe.weight", (config.context, C)
    of_layers = {
        "ln_1": (C,), "attn.c_attn": (3 * C, C), "attn.c_proj": (C, C),
        "ln_2": (C,), "mlp.c_fc": (4 * C, C), "mlp.c_proj": (C, 4 * C),
    }  # fmt: skip
    for part, shape in of_layers.items():
        for kind, size in (("weight", shape), ("bias", shape[:1])):
            for layer in range(config.num_layers):
                yield f"h.{layer}.{part}.{kind}", size
    yield "ln_f.weight", (C,)
    yield "ln_f.bias", (C,)
