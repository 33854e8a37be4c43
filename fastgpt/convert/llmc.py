"""Models in llm.c's `.bin` files: 256 numbers, then all weights of a kind, layer by layer.

Source: llm.c, `train_gpt2.py`, write_model, and `train_gpt2.cu`, gpt2_build_from_checkpoint.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fastgpt.checkpoint.tensors import octets
from fastgpt.config.model import ModelConfig
from fastgpt.convert.family import PLAIN_GPT2_NEEDS, check_expressed
from fastgpt.errors import UserError

MAGIC, NUMBERS = 20240326, 256
VERSIONS = {3: torch.float32, 5: torch.bfloat16}
PADDING = 128
"""The vocabulary is padded to a multiple of this."""
NEEDS = PLAIN_GPT2_NEEDS | {"activation": ("gelu_tanh",), "bias": (True,)}


def parts(config: ModelConfig) -> Iterator[tuple[list[str], tuple[int, ...]]]:
    """Yields (our names, shape of each tensor) in the order of the file."""
    C, T, Vp = config.dim, config.context, _padded(config)
    yield ["wte.weight"], (Vp, C)
    yield ["wpe.weight"], (T, C)
    of_layers = {
        "ln_1": (C,), "attn.c_attn": (3 * C, C), "attn.c_proj": (C, C),
        "ln_2": (C,), "mlp.c_fc": (4 * C, C), "mlp.c_proj": (C, 4 * C),
    }  # fmt: skip
    for part, shape in of_layers.items():
        for kind, size in (("weight", shape), ("bias", shape[:1])):
            yield [f"h.{layer}.{part}.{kind}" for layer in range(config.num_layers)], size
    yield ["ln_f.weight"], (C,)
    yield ["ln_f.bias"], (C,)


def _padded(config: ModelConfig) -> int:
    assert config.vocab_size is not None
    return -(-config.vocab_size // PADDING) * PADDING


def read_llmc(path: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Reads a model file, fp32 (version 3) or bf16 (version 5): (settings, weights by our names).

    Raises:
        UserError: it is no such file, or is longer or shorter than its sizes say.
    """
    header = np.fromfile(path, "<i4", NUMBERS)
    if len(header) < NUMBERS or header[0] != MAGIC or header[1] not in VERSIONS:
        found = header[:2].tolist()
        raise UserError(
            f"{path} is no model of llm.c: it begins with {found}, expected {MAGIC} and version 3"
            " or 5"
        )
    T, V, layers, heads, C, padded = header[2:8].tolist()
    config = ModelConfig(
        num_layers=layers, num_heads=heads, dim=C, context=T, vocab_size=V, activation="gelu_tanh"
    )
    if padded != _padded(config):
        raise UserError(f"{path} pads {V} tokens to {padded}: expected {_padded(config)}")
    dtype = VERSIONS[int(header[1])]
    expected = 4 * NUMBERS + _length(config) * dtype.itemsize
    if path.stat().st_size != expected:
        raise UserError(f"{path} has {path.stat().st_size:,} bytes: expected {expected:,}")
    bits = np.memmap(path, f"<u{dtype.itemsize}", "c", offset=4 * NUMBERS)
    return config, _cut(torch.from_numpy(bits).view(dtype), config)


def _length(config: ModelConfig) -> int:
    return sum(len(names) * int(np.prod(shape)) for names, shape in parts(config))


def _cut(whole: Tensor, config: ModelConfig) -> dict[str, Tensor]:
    """Cuts all weights (N,), or as many numbers of another kind, into tensors by our names."""
    weights, start = {}, 0
    for names, shape in parts(config):
        size = int(np.prod(shape))
        for name in names:
            weights[name] = whole[start : start + size].view(shape)
            start += size
    weights["wte.weight"] = weights["wte.weight"][: config.vocab_size]
    return weights


def write_llmc(config: ModelConfig, weights: Mapping[str, Tensor], path: Path) -> None:
    """Writes a model file, in the dtype of the weights: fp32 (version 3) or bf16 (version 5).

    Raises:
        UserError: llm.c cannot express the model or its dtype.
    """
    check_expressed("llm.c", NEEDS, config)
    dtype = weights["wte.weight"].dtype
    version = next((number for number, known in VERSIONS.items() if known == dtype), None)
    if version is None:
        raise UserError(f"llm.c cannot express {dtype}: expected --dtype fp32 or bf16")
    header = np.zeros(NUMBERS, "<i4")
    sizes = (config.context, config.vocab_size, config.num_layers, config.num_heads, config.dim)
    header[:8] = MAGIC, version, *sizes, _padded(config)
    with path.open("wb") as file:
        file.write(header.tobytes())
        for names, shape in parts(config):
            for name in names:
                x = weights[name]
                file.write(octets(x).data)
                missing = shape[0] - x.shape[0]  # rows of the padded vocabulary
                file.write(bytes(missing * x[0].nbytes))
