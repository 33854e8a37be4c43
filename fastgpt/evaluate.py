"""What a model can do so far: its loss on held-out text, and a sample of its own."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor

from fastgpt.data.loader import IGNORED
from fastgpt.data.tokenizer import Tokenizer
from fastgpt.distributed import World
from fastgpt.errors import UserError
from fastgpt.generate import generate
from fastgpt.model import GPT


@torch.no_grad()
def mean_loss(
    model: Callable[[Tensor, Tensor], Tensor],
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    world: World,
    device: str,
    autocast: AbstractContextManager,
) -> tuple[float, int]:
    """Mean loss in nats over the targets of all ranks' batches, and how many they are.

    Args:
        model: (tokens, targets) -> mean loss, in evaluation mode.
        batches: this rank's; each has the shape of training's, so that nothing recompiles.
        world: the ranks.
        device: of the model.
        autocast: entered around each forward.
    """
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    for x, y in batches:
        count = int((y != IGNORED).sum())
        with autocast:
            loss = model(x.to(device), y.to(device))
        totals += torch.stack((loss.double() * count, torch.tensor(count, device=device)))
    total, count = world.sum(totals).tolist()
    return total / count, int(count)


def encode_prompt(prompt: str, tokenizer: Tokenizer) -> Tensor:
    """(1, T) int64.

    Raises:
        UserError: the prompt is empty, or has a character that the tokenizer does not know.
    """
    ids = tokenizer.encode(prompt)
    if not len(ids) and tokenizer.eot_id is not None:
        ids = np.array([tokenizer.eot_id])  # what a document begins with
    if not len(ids):
        raise UserError("the prompt is empty: expected at least one token to go on from")
    return torch.from_numpy(ids.astype(np.int64))[None]


def sample_text(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: Tensor,
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    top_k: int | None = None,
    top_p: float | None = None,
    count: int = 1,
    device: str = "cpu",
) -> list[str]:
    """`count` continuations of `prompt` (1, T), prompt included; the arguments are `generate`'s."""
    tokens = generate(
        model,
        prompt.expand(count, -1).to(device),
        max_new_tokens=max_new_tokens,
        vocab_size=tokenizer.vocab_size,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        generator=torch.Generator().manual_seed(seed),
    )
    return [tokenizer.decode(row.cpu().numpy()) for row in tokens]
