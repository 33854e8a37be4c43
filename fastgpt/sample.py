"""Sampling from a trained model: `python -m fastgpt.sample RUN --prompt "To be"`."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro

from fastgpt import flags
from fastgpt.autotune.choose import require_toolchain
from fastgpt.checkpoint.checkpoint import is_checkpoint, read_record
from fastgpt.commands import command
from fastgpt.config.checks import INT64, SHARE, Range, check_fields
from fastgpt.config.config import MOST_TOKENS, OpsConfig
from fastgpt.convert.source import open_model
from fastgpt.device import device
from fastgpt.errors import UserError, shown_in_one_line
from fastgpt.model.generation import OPTIONS
from fastgpt.sampling.chat import talk, template_of
from fastgpt.sampling.streaming import print_stream, stream
from fastgpt.sampling.text import encode_prompt, sample_text
from fastgpt.terminal import print_line, print_text

ONE_OR_MORE = Range("1 or more", lambda x: x >= 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleConfig:
    """Continues text with a trained model."""

    run: Annotated[Path, tyro.conf.Positional]
    """Model to sample from: folder of a run, of a checkpoint such as RUN/checkpoints/best, or of a
    Hugging Face model, the name of one on the hub, or a .gguf file; it needs a tokenizer. For a
    run, its best checkpoint is used, or else its newest valid one."""
    prompt: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Text to continue; by default a newline. It may be repeated for several prompts, which are
    continued in one batch."""
    chat: bool = False
    """Conversation with the model, which answers each line of standard input. It needs a chat
    template, as a model has that was trained on conversations."""
    n: Annotated[int, ONE_OR_MORE] = 1
    """Number of samples for each prompt."""
    tokens: Annotated[int, ONE_OR_MORE] = 300
    """Number of new tokens in each sample."""
    temperature: Annotated[
        float, Range("0, or a number from 1e-6 on", lambda x: x == 0 or x >= 1e-6)
    ] = 0.8
    """Sampling temperature; 0 takes the likeliest token. Higher values are more varied."""
    top_k: Annotated[int | None, ONE_OR_MORE] = None
    """Number of likeliest tokens to sample from; by default all."""
    top_p: Annotated[float | None, Range("a number in (0, 1]", lambda x: 0 < x <= 1)] = None
    """Probability mass to sample from (nucleus sampling). Only the likeliest tokens that together
    reach it are kept; above 0 and at most 1, by default 1."""
    min_p: Annotated[float | None, SHARE] = None
    """Least probability of a token to sample, as a share of the likeliest one's; by default 0."""
    repetition_penalty: Annotated[
        float, Range("a number from 0.1 to 10", lambda x: 0.1 <= x <= 10)
    ] = 1.0
    """Factor by which tokens that the text already has become less likely; 1 is none."""
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Text before which a sample ends. It may be repeated."""
    seed: Annotated[int, INT64] = 1337
    """Random seed for sampling."""
    exact: bool = False
    """Computation in which a prompt's result does not depend on the other prompts. With
    --temperature 0 it is the same text alone and among others; it takes 1.2 to 2.5 times as
    long."""
    device: Literal["auto", "cuda", "xpu", "mps", "cpu"] = "auto"
    """Device to run on: cuda, cpu, or auto to choose. `auto` uses CUDA if it is available."""
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Precision of the matrix products. `auto` uses bf16 where the hardware multiplies it."""
    kernels: Literal["auto", "torch", "triton"] = "auto"
    """Implementation of normalisation, rotary positions, activation, and attention over the
    key/value cache. `auto` uses PyTorch's; triton: our kernels, on CUDA."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.n * self.tokens > MOST_TOKENS:
            raise UserError(
                f"--n is {self.n}, --tokens is {self.tokens}: expected at most {MOST_TOKENS:,}"
                " tokens in all samples"
            )


def separated(texts: Sequence[str], each: int) -> str:
    """Joins samples, `each` of every prompt in turn; a line above each of several tells which."""
    if len(texts) == 1:
        return texts[0]
    prompts = len(texts) // each
    return "\n".join(
        f"--- prompt {i // each + 1} of {prompts}, sample {i % each + 1} of {each} ---\n{text}"
        for i, text in enumerate(texts)
    )


def main(argv: list[str]) -> None:
    """Runs the command line `argv`."""
    config = flags.command(SampleConfig, argv, prog=command("python -m fastgpt.sample"))
    on = device.pick_device(config.device, "--device")
    precision = device.pick_precision(config.precision, on, "--precision")
    asked = OpsConfig(kernels=config.kernels)
    try:
        require_toolchain(asked, on)
        best = config.run.expanduser() / "checkpoints" / "best"  # of lowest validation loss
        best = best if is_checkpoint(best) else None
        found = open_model(best or config.run)
        tokenizer, model = found.known_tokenizer(), found.build_gpt(on, asked)
    except UserError as error:
        raise UserError(str(error).replace("--ops.kernels", "--kernels")) from error
    options = {name: getattr(config, name) for name in (*OPTIONS, "stop", "exact")}
    options["max_new_tokens"] = config.tokens
    autocast = device.autocast(on, precision)
    said = best and f"sampling from {best}, step {read_record(best)['step']}, of lowest val loss"
    if config.chat:
        template = template_of(found.hf_files)
        if template is None:
            raise UserError(f"{config.run} has no chat template: expected a model that can chat")
        generator = torch.Generator().manual_seed(config.seed)
        if said:
            print_line(said)
        with autocast:
            talk(model, tokenizer, template, generator=generator, **options)
        return
    prompts = [encode_prompt(prompt, tokenizer, "--prompt") for prompt in config.prompt or ("\n",)]
    for prompt in prompts:
        if len(prompt) > (context := model.config.context):
            print_line(
                f"warning: --prompt has {len(prompt):,} tokens: the model sees the last"
                f" {context:,}, its context"
            )
    if said:
        print_line(said)
    if len(prompts) * config.n == 1:
        generator = torch.Generator().manual_seed(config.seed)
        with autocast:
            pieces = stream(model, tokenizer, prompts[0], generator=generator, **options)
            print_stream(chain([tokenizer.decode(prompts[0].numpy())], map(str, pieces)))
        return
    options |= {"count": config.n, "seed": config.seed, "device": on}
    with autocast:
        texts = sample_text(model, tokenizer, prompts, **options)
    print_text(separated(texts, config.n))


def console() -> None:
    """Runs the console command `fastgpt-sample`."""
    with shown_in_one_line():
        main(sys.argv[1:])


if __name__ == "__main__":
    console()
