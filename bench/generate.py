"""Times text generation beside transformers and nanoGPT: `python -m bench.generate [recipe]`.

All models have random weights and take the likeliest token at each step, on a CPU. nanoGPT keeps no
keys and values, and has the exact GELU; transformers always has biases. The sizes are equal.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from torch.nn.utils.rnn import pad_sequence

from bench import records, report
from bench.measure import Timed, Timer, quantiles
from bench.trainers import expect_gpt2, nanogpt_model
from fastgpt import flags
from fastgpt.cli import configure
from fastgpt.commands import installed
from fastgpt.convert.families import settings_for
from fastgpt.device import device
from fastgpt.errors import UserError, run_command
from fastgpt.model.generation import generate
from fastgpt.model.gpt import GPT


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateBench:
    """Times text generation beside transformers and nanoGPT, on a CPU."""

    recipe: Annotated[str, tyro.conf.Positional] = "gpt2-124m"
    """Recipe of the network, which must be a GPT-2."""
    prompt: int = 64
    """Number of tokens of the longest prompt."""
    tokens: int = 128
    """Number of new tokens."""
    rounds: int = 5
    """Number of timed rounds; every implementation has a turn in each."""
    nanogpt: Path | None = None
    """Path of a nanoGPT checkout, whose model.py is imported."""

    def __post_init__(self) -> None:
        for name, least in (("prompt", 4), ("tokens", 1), ("rounds", 2)):
            if getattr(self, name) < least:
                raise UserError(f"--{name} is {getattr(self, name)}: expected {least} or more")


def ours(model: GPT, tokens: int, precision: str, exact: bool, prompts: list[torch.Tensor]) -> None:
    lengths, padded = torch.tensor([*map(len, prompts)]), pad_sequence(prompts, True)
    with device.autocast("cpu", precision):
        generate(model, padded, lengths=lengths, max_new_tokens=tokens, temperature=0, exact=exact)


def transformers(model: Any, tokens: int, prompts: list[torch.Tensor]) -> None:
    padded = pad_sequence(prompts, True, padding_side="left")
    real = pad_sequence([torch.ones_like(x) for x in prompts], True, padding_side="left")
    how = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
    model.generate(padded, attention_mask=real, pad_token_id=0, **how)


def run(bench: GenerateBench) -> Iterator[records.Record]:
    """Yields a record for each case and implementation, with the seconds of all tokens."""
    config, tokens = configure([bench.recipe]).model, bench.tokens
    expect_gpt2(config := replace(config, vocab_size=config.vocab_size or 65, dropout=0.0))
    if bench.prompt + tokens > (room := config.context):
        raise UserError(f"--tokens is {tokens}: expected at most {room} in all, with --prompt")
    if installed("transformers") is None:
        raise UserError("transformers is not installed: expected pip install transformers")
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT.from_config(config).eval()
    theirs: Any = GPT2LMHeadModel(GPT2Config(**settings_for(config))).eval()
    rivals = {
        "fastgpt": partial(ours, model, tokens, "fp32", False),
        "fastgpt exact": partial(ours, model, tokens, "fp32", True),
        "fastgpt bf16": partial(ours, model, tokens, "bf16", False),
        "transformers": partial(transformers, theirs, tokens),
    }
    alone: dict[str, Any] = {**rivals}
    if bench.nanogpt is not None:  # which continues no prompts of several lengths
        nanogpt = nanogpt_model(config, bench.nanogpt).eval()
        alone["nanogpt"] = lambda prompts: nanogpt.generate(torch.stack(prompts), tokens, top_k=1)
    longest = [*torch.randint(65, (4, bench.prompt))]  # characters of tiny shakespeare
    shorter = [prompt[: bench.prompt * (i + 1) // 4] for i, prompt in enumerate(longest)]
    cases = {"1 prompt": longest[:1], "4 prompts": longest, "4 unequal prompts": shorter}
    for name, prompts in cases.items():
        calls = alone if len(prompts) == 1 else rivals
        timed = {who: Timed(call, partial(list, prompts)) for who, call in calls.items()}
        more: Any = {"prompts": [*map(len, prompts)], "tokens": tokens}
        for who, found in Timer("cpu").interleave(timed, seconds=0, rounds=bench.rounds).items():
            yield records.record(f"generate/{bench.recipe}/{name}", who, quantiles(found), **more)


def main(argv: list[str]) -> None:
    rows = [*run(flags.command(GenerateBench, argv, prog="python -m bench.generate"))]
    lines = ((row["case"], row["implementation"], report.quantiles_of(row)) for row in rows)
    report.show("case|implementation|s (p20, p50, p80)", lines)
    print(records.Writer("cpu").write(*rows))


if __name__ == "__main__":
    run_command(main)
