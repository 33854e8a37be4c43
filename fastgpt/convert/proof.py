"""Proof that a converted model is the same: logits and text of both, computed by each side.

What was written is read back: by fastgpt, to compare all bits, and by the program that it was
written for, to compare what it computes with what the source's own program does.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastgpt.checkpoint.tensors import octets
from fastgpt.convert.source import Source, read
from fastgpt.errors import UserError
from fastgpt.model.generation import generate

TOLERANCE = 1e-4
"""Largest difference of logits, as a share of their largest magnitude."""
PROMPTS, LENGTH, NEW = 2, 240, 16
"""Number of random prompts, their length, and the tokens by which they are continued."""


@dataclass(frozen=True, slots=True)
class Answers:
    """A model's answers to the same random prompts, in fp32 on the CPU."""

    text: Tensor
    """(PROMPTS, T) int64: the prompts, continued with the likeliest tokens."""
    logits: Tensor
    """(PROMPTS, T, V) fp32, of that text."""


def prompts(vocab_size: int, context: int) -> tuple[Tensor, int]:
    """Returns random prompts (PROMPTS, T) int64, and by how many tokens to continue them."""
    length = max(1, min(LENGTH, context // 2))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocab_size, (PROMPTS, length), generator=generator)
    return tokens, min(NEW, context - length)


def rounded(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Rounds a model's weights to `dtype`, if given; they stay fp32."""
    if dtype is not None:
        for weight in model.parameters():
            weight.data = weight.to(dtype).float()


@torch.no_grad()
def ours(path: Path, dtype: torch.dtype | None) -> Answers:
    """Computes the answers with fastgpt, for weights rounded to `dtype`, if given."""
    source = read(str(path))
    model, vocab_size = source.build(), source.weights.plan["wte.weight"].shape[0]
    rounded(model, dtype)
    tokens, new = prompts(vocab_size, source.config.context)
    text = generate(model, tokens, max_new_tokens=new, vocab_size=vocab_size, temperature=0)
    return Answers(text, model(text))


@torch.no_grad()
def transformers_says(path: Path, dtype: torch.dtype | None) -> Answers:
    """Computes the answers with transformers, for weights rounded to `dtype`, if given.

    Raises:
        UserError: it is not installed.
    """
    try:
        from transformers import AutoModelForCausalLM
    except ModuleNotFoundError as error:
        raise UserError(
            "the proof needs the package transformers, by which the model is read: run make setup,"
            " or pass --no-verify"
        ) from error
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    rounded(model, dtype)
    settings = model.config
    text, new = prompts(settings.vocab_size, settings.max_position_embeddings)
    for _ in range(new):  # its own generation would follow the folder's generation_config.json
        likeliest = model(text).logits[:, -1:].argmax(-1)
        text = torch.cat((text, likeliest), 1)
    return Answers(text, model(text).logits)


BY: dict[str, Callable[[Path, torch.dtype | None], Answers]] = {
    "hf": transformers_says, "run": ours, "nanogpt": ours, "llmc": ours,
}  # fmt: skip
"""Kind of files -> the program that reads them; nanoGPT and llm.c cannot be installed."""


def digests(weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Returns the sha256 of each tensor's bytes."""
    return {name: hashlib.sha256(octets(x).data).hexdigest() for name, x in weights.items()}


def prove(
    source: Source,
    target: Path,
    to: str,
    bits: dict[str, str],
    dtype: torch.dtype | None = None,
) -> str:
    """Compares a converted model with its source; both are not in memory at the same time.

    Args:
        source: what was converted; only its path and kind are used.
        target: what was written, of the kind `to`, a key of `BY`.
        bits: `digests` of the weights that were to be written.
        dtype: to which they were rounded; None: they were not.

    Returns:
        str: what was compared, and the largest difference.

    Raises:
        UserError: they differ.
    """
    wrong = f"what was written is not {source.path}"
    written = digests(read(str(target)).weights)
    for name in sorted(bits.keys() | written.keys()):
        if bits.get(name) != written.get(name):
            raise UserError(f"{wrong}: {name} differs")
    before, after = BY[source.kind](source.path, dtype), BY[to](target, None)
    if before.logits.shape != after.logits.shape:
        shapes = f"{tuple(before.logits.shape)} and {tuple(after.logits.shape)}"
        raise UserError(f"{wrong}: logits of {shapes}")
    scale = before.logits.abs().max().clamp(min=1e-30)
    same = (before.text == after.text).cumprod(1).bool()  # after other text, logits may differ
    error = ((after.logits - before.logits)[same].abs().max() / scale).item()
    if not error <= TOLERANCE:
        raise UserError(
            f"{wrong}: the logits differ by {error:.2g} of the largest,"
            f" expected at most {TOLERANCE:g}"
        )
    for row, shared in enumerate(same.sum(1).tolist()):
        if shared < same.shape[1]:
            first, second = before.logits[row, shared - 1].topk(2).values
            if first - second > 2 * TOLERANCE * scale:  # else both are the likeliest
                raise UserError(f"{wrong}: its text differs from token {shared} on")
    alike = "equal" if same.all() else "equal up to a tie"
    return (
        f"proved: {len(bits)} tensors have the same bits, logits of {int(same.sum())} tokens differ"
        f" by at most {error:.1e} of the largest, and the likeliest continuations are {alike}"
    )
