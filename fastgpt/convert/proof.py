"""Proof that a converted model is the same: its bits, and its logits by transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastgpt.checkpoint.tensors import octets
from fastgpt.convert.source import OpenedModel, read
from fastgpt.errors import UserError
from fastgpt.model.generation import generate

TOLERANCE = 1e-4
"""Largest difference of logits, as a share of their largest magnitude."""
PROMPTS, LENGTH, NEW = 2, 240, 16
"""Number of random prompts, their length, and the tokens by which they are continued."""


def prove(source: OpenedModel, target: Path, to: str) -> str:
    """Compares a converted model with its source; returns what was compared.

    All bits are compared as fastgpt reads them. If one of both is a folder of Hugging Face,
    transformers computes the logits of that one, and fastgpt those of the other.

    Args:
        source: what was converted, with the weights that were to be written.
        target: what was written, of the kind `to`: hf or run.

    Raises:
        UserError: they differ, or transformers is not installed.
    """
    wrong, written = f"what was written is not {source.path}", read(str(target))
    for name in sorted(source.weights.plan.keys() | written.weights.plan.keys()):
        if not _same_bits(name, source, written):
            raise UserError(f"{wrong}: {name} differs")
    same = f"proved: {len(written.weights)} tensors have the same bits"
    if to == "hf":
        ours, folder = source, target
    elif source.kind == "hf":
        ours, folder = written, source.path
    else:
        return same
    text, expected, new = _continued(ours)
    logits = _transformers_logits(folder, text, ours.weights.plan["wte.weight"].dtype)
    if logits.shape != expected.shape:
        raise UserError(f"{wrong}: logits of {tuple(expected.shape)} and {tuple(logits.shape)}")
    scale = expected.abs().max().clamp(min=1e-30)
    error = ((logits - expected).abs().max() / scale).item()
    if not error <= TOLERANCE:
        raise UserError(
            f"{wrong}: the logits differ by {error:.2g} of the largest,"
            f" expected at most {TOLERANCE:g}"
        )
    likeliest = logits[:, -new - 1 : -1].argmax(-1)
    alike = "equal" if torch.equal(likeliest, text[:, -new:]) else "equal up to a tie"
    return (
        f"{same}, logits of {text.numel()} tokens differ by at most {error:.1e} of the largest, and"
        f" the likeliest continuations are {alike}"
    )


def _same_bits(name: str, *sources: OpenedModel) -> bool:
    """Returns True if all models have a tensor of that name, with the same dtype and bits."""
    if any(name not in source.weights.plan for source in sources):
        return False
    a, b = (source.weights[name] for source in sources)
    return (a.shape, a.dtype) == (b.shape, b.dtype) and np.array_equal(octets(a), octets(b))


@torch.no_grad()
def _continued(source: OpenedModel) -> tuple[Tensor, Tensor, int]:
    """Continues random prompts with the likeliest tokens, in fp32 on the CPU.

    Returns:
        tuple[Tensor, Tensor, int]: the text (PROMPTS, T) int64, its logits (PROMPTS, T, V) fp32 and
            the number of new tokens.
    """
    model, context = source.build_gpt(), source.config.context
    assert source.config.vocab_size is not None
    length = max(1, min(LENGTH, context // 2))
    new = min(NEW, context - length)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(source.config.vocab_size, (PROMPTS, length), generator=generator)
    text = generate(
        model, prompts, max_new_tokens=new, vocab_size=source.config.vocab_size, temperature=0
    )
    return text, model(text), new


@torch.no_grad()
def _transformers_logits(folder: Path, text: Tensor, dtype: torch.dtype) -> Tensor:
    """Computes the logits of a text with transformers, in fp32 from weights rounded to `dtype`."""
    try:
        from transformers import AutoModelForCausalLM
    except ModuleNotFoundError as error:
        raise UserError(
            "the proof needs the package transformers, by which the model is read: run make setup,"
            " or pass --no-verify"
        ) from error
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for weight in model.parameters():
        weight.data = weight.to(dtype).float()
    return model(text).logits
