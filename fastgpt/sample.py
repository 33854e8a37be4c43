"""Text from a trained model: `python -m fastgpt.sample RUN --prompt "To be" [--prompt ...]`."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro
from torch import Tensor

from fastgpt import checkpoint, device, ops
from fastgpt.config import INT64, MOST_TOKENS, OpsConfig, check
from fastgpt.data.tokenizers import Tokenizer, load_tokenizer
from fastgpt.display import command
from fastgpt.errors import UserError, shown_in_one_line
from fastgpt.evaluate import encode_prompt, sample_text
from fastgpt.lecture import build_model
from fastgpt.model import GPT
from fastgpt.run import saved_config


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleConfig:
    """Continues prompts with a trained model."""

    run: Annotated[Path, tyro.conf.Positional]
    """A run's directory (its newest good checkpoint is taken) or a checkpoint's, such as
    RUN/checkpoints/best."""
    prompt: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """What to go on from, a line feed if not given; more of them are continued together."""
    n: int = 1
    """Samples of each prompt."""
    tokens: int = 300
    """New tokens in each."""
    temperature: float = 0.8
    """Divides the logits; 0 takes the likeliest token."""
    top_k: int | None = None
    """Draw from this many likeliest tokens only."""
    top_p: float | None = None
    """Draw from the likeliest tokens that together reach this probability only."""
    seed: int = 1337
    """Random seed for sampling."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: CUDA where it is visible."""
    decode: Literal["auto", "torch", "triton"] = "auto"
    """Attention of each new token over those before: see ops.decode of a run."""

    def __post_init__(self) -> None:
        check(self, ("1 or more", lambda x: x >= 1), "--n", "--tokens", "--top-k")
        check(self, INT64, "--seed")
        warm = ("0, or a number from 1e-6 on", lambda x: x == 0 or 1e-6 <= x < float("inf"))
        check(self, warm, "--temperature")
        check(self, ("a number in (0, 1]", lambda x: 0 < x <= 1), "--top-p")
        if self.n * self.tokens > MOST_TOKENS:
            raise UserError(
                f"--n is {self.n}, --tokens is {self.tokens}: expected {MOST_TOKENS:,} tokens at"
                " most in all"
            )


def load_run(
    path: Path | str, on: str = "cpu", asked: OpsConfig | None = None
) -> tuple[GPT, Tokenizer]:
    """A trained model in evaluation mode, and its tokenizer.

    Args:
        path: a run's directory (its newest good checkpoint is taken) or a checkpoint's.
        on: the device.
        asked: implementations of the model's ops; by default those that fit the device.

    Raises:
        UserError: there is no good checkpoint.
    """
    found, complaints = checkpoint.find(str(path))
    for complaint in complaints:
        print(f"warning: {complaint}", file=sys.stderr)
    selected = ops.select(asked or OpsConfig(), on, compiled=False)
    model = build_model(saved_config(found.path).model, selected)
    model.load_state_dict(found.weights)
    return model.to(on).eval(), load_tokenizer(found.path / "tokenizer.json")


def encode_prompts(prompts: Sequence[str], tokenizer: Tokenizer) -> list[Tensor]:
    """(T,) int64 of each.

    Raises:
        UserError: names the prompt that cannot be continued, and why.
    """
    encoded = []
    for prompt in prompts or ("\n",):
        try:
            encoded.append(encode_prompt(prompt, tokenizer))
        except UserError as error:
            raise UserError(f"--prompt is {prompt!r}: {error}") from error
    return encoded


def main(argv: list[str]) -> None:
    config = tyro.cli(SampleConfig, prog=command("python -m fastgpt.sample"), args=argv)
    on = device.pick_device(config.device, "--device")
    model, tokenizer = load_run(config.run, on, OpsConfig(decode=config.decode))
    prompts = encode_prompts(config.prompt, tokenizer)
    with device.autocast(on, device.pick_precision("auto", on)), torch.no_grad():
        texts = sample_text(
            model,
            tokenizer,
            prompts,
            max_new_tokens=config.tokens,
            temperature=config.temperature,
            seed=config.seed,
            top_k=config.top_k,
            top_p=config.top_p,
            count=config.n,
            device=on,
        )
    print("\n---\n".join(texts))


def console() -> None:
    """The console command `fastgpt-sample`."""
    with shown_in_one_line():
        main(sys.argv[1:])


if __name__ == "__main__":
    console()
