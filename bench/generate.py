"""Times text generation beside transformers and nanoGPT: `python -m bench.generate [recipe]`.

All models have random weights and take the likeliest token at each step, on a CPU. transformers and
fastgpt keep keys and values in a cache; nanoGPT computes the whole text again for each token. The
sizes are equal; transformers always has biases, and nanoGPT the exact GELU.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bench import records, tables
from bench.implementations import expect_gpt2
from bench.timing import Timed, Timer, quantiles
from bench.trainers import nanogpt_module
from fastgpt import flags
from fastgpt.config.config import OpsConfig
from fastgpt.config.model import ModelConfig
from fastgpt.config.recipes import RECIPES
from fastgpt.device import device
from fastgpt.errors import UserError, run_command, unknown_name
from fastgpt.kernels import batch_invariant
from fastgpt.model.build import build_model
from fastgpt.model.generation import generate
from fastgpt.ops.tables import select

VOCABULARY = 65
"""Tiny shakespeare's vocabulary, for recipes that take theirs from the text."""
PROMPTS = 4
"""Number of prompts in the cases with several."""
Generates = Callable[[list[Tensor]], Any]
"""Function that continues prompts, (T,) each, in one batch."""


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
        for name, least in (("prompt", PROMPTS), ("tokens", 1), ("rounds", 2)):
            if getattr(self, name) < least:
                raise UserError(f"--{name} is {getattr(self, name)}: expected {least} or more")


def ours(config: ModelConfig, precision: str, tokens: int, exact: bool = False) -> Generates:
    model = build_model(config, select(OpsConfig(), "cpu")).eval()
    vocab = config.vocab_size
    assert vocab is not None

    def call(prompts: list[Tensor]) -> Tensor:
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        padded = pad_sequence(prompts, batch_first=True)
        with device.autocast("cpu", precision), batch_invariant(exact):
            return generate(
                model, padded, lengths=lengths, max_new_tokens=tokens, vocab_size=vocab,
                temperature=0,
            )  # fmt: skip

    return call


def transformers(config: ModelConfig, tokens: int) -> Generates:
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError as error:
        raise UserError(f"transformers is not installed ({error})") from error
    assert config.vocab_size is not None
    sizes = GPT2Config(
        vocab_size=config.vocab_size, n_positions=config.context, n_embd=config.dim,
        n_layer=config.num_layers, n_head=config.num_heads,
        activation_function="gelu" if config.activation == "gelu_erf" else "gelu_new",
    )  # fmt: skip
    model: Any = GPT2LMHeadModel(sizes).eval()

    def call(prompts: list[Tensor]) -> Any:
        padded = pad_sequence(prompts, batch_first=True, padding_side="left")
        real = pad_sequence([torch.ones_like(p) for p in prompts], True, padding_side="left")
        return model.generate(
            padded, attention_mask=real, max_new_tokens=tokens, min_new_tokens=tokens,
            do_sample=False, pad_token_id=0,
        )  # fmt: skip

    return call


def nanogpt(config: ModelConfig, tokens: int, checkout: Path) -> Generates:
    module = nanogpt_module(checkout)
    sizes = module.GPTConfig(
        block_size=config.context, vocab_size=config.padded_vocab, n_layer=config.num_layers,
        n_head=config.num_heads, n_embd=config.dim, dropout=0.0, bias=config.bias,
    )  # fmt: skip
    model = module.GPT(sizes).eval()
    return lambda prompts: model.generate(torch.stack(prompts), tokens, top_k=1)


def time_generation(bench: GenerateBench) -> list[dict[str, Any]]:
    """Returns a row for each case and implementation, with the seconds of all tokens."""
    config = RECIPES[bench.recipe][1].model
    vocab = config.vocab_size or VOCABULARY
    config = replace(config, vocab_size=vocab, dropout=0.0)
    expect_gpt2(config)
    if bench.nanogpt is not None:
        nanogpt_module(bench.nanogpt)
    if bench.prompt + bench.tokens > config.context:
        raise UserError(
            f"--prompt is {bench.prompt}, --tokens is {bench.tokens}: expected at most"
            f" {config.context} in all, the context of {bench.recipe}"
        )
    cached = {
        "fastgpt": ours(config, "fp32", bench.tokens),
        "fastgpt exact": ours(config, "fp32", bench.tokens, exact=True),
        "fastgpt bf16": ours(config, "bf16", bench.tokens),
        "transformers": transformers(config, bench.tokens),
    }
    single = dict(cached)
    if bench.nanogpt is not None:
        single["nanogpt"] = nanogpt(config, bench.tokens, bench.nanogpt)
    longest = [torch.randint(vocab, (bench.prompt,)) for _ in range(PROMPTS)]
    shorter = [prompt[: bench.prompt * (i + 1) // PROMPTS] for i, prompt in enumerate(longest)]
    cases = {
        "1 prompt": (single, longest[:1]),
        f"{PROMPTS} prompts": (cached, longest),
        f"{PROMPTS} unequal prompts": (cached, shorter),
    }
    rows = []
    for name, (implementations, prompts) in cases.items():
        rivals = {
            who: Timed(call, prepare=lambda given=prompts: given)
            for who, call in implementations.items()
        }
        about = {
            "case": f"generate/{bench.recipe}/{name}",
            "prompts": [len(prompt) for prompt in prompts],
            "tokens": bench.tokens,
        }
        with torch.no_grad():
            samples = Timer("cpu").interleave(rivals, seconds=0, rounds=bench.rounds)
        rows += [
            {**about, "implementation": who, "seconds": quantiles(found.device)}
            for who, found in samples.items()
        ]
    return rows


def main(argv: list[str]) -> None:
    bench = flags.parse(GenerateBench, argv, prog="python -m bench.generate")
    if bench.recipe not in RECIPES:
        raise unknown_name("recipe", bench.recipe, RECIPES)
    rows = time_generation(bench)
    records.show(tables.GENERATE, map(tables.generate_cells, rows))
    print(records.Writer("cpu").write("generate", *rows))


if __name__ == "__main__":
    run_command(main)
