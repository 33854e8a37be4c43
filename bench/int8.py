"""Times generation with int8 weights beside other formats and programs: `python -m bench.int8`.

One prompt on a CPU, in one process and with the same sizes: fastgpt in fp32, with bf16 weights,
compiled and with int8 weights, transformers, and llama.cpp (llama-cpp-python, which pip builds).
`--run` and `--text` compare the perplexity of int8 weights with that of fp32.
"""

import math
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from torch import Tensor

import fastgpt
from bench import records, tables
from bench.generate import transformers
from bench.timing import Timed, Timer, quantiles
from fastgpt import flags
from fastgpt.checkpoint.tensors import in_memory
from fastgpt.config.recipes import RECIPES
from fastgpt.convert.gguf import write_gguf
from fastgpt.convert.source import OpenedModel
from fastgpt.data.tokenizers import ByteTokenizer
from fastgpt.errors import run_command
from fastgpt.model.generation import generate
from fastgpt.model.gpt import GPT
from fastgpt.model.int8 import to_int8


@dataclass(frozen=True, kw_only=True, slots=True)
class Int8Bench:
    """Times generation with int8 weights beside other formats and programs, on a CPU."""

    recipe: str = "gpt2-124m"
    """Recipe of the network, which has random weights."""
    threads: int = 1
    """Number of threads of every contender."""
    prompt: int = 4
    """Number of tokens of the prompt."""
    tokens: int = 48
    """Number of new tokens."""
    rounds: int = 9
    """Number of timed rounds; every contender has a turn in each."""
    run: str | None = None
    """Trained run whose perplexity is compared."""
    text: Path | None = None
    """Text to score with it."""


def ours(model: Any, tokens: int) -> Callable[[Tensor], Any]:
    vocab = model.config.vocab_size
    return lambda prompt: generate(
        model, prompt, max_new_tokens=tokens, vocab_size=vocab, temperature=0
    )


def llama(model: GPT, dtype: str, bench: Int8Bench) -> Callable[[Tensor], Any]:
    from llama_cpp import Llama  # pyright: ignore[reportMissingImports] - built from source

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.gguf"
        source = OpenedModel(file, model.config, in_memory(model.state_dict()), ByteTokenizer())
        write_gguf(source, file, dtype)
        size, threads = bench.prompt + bench.tokens, bench.threads
        theirs = Llama(str(file), n_ctx=size, n_threads=threads, n_threads_batch=threads,
                       verbose=False)  # fmt: skip

    def call(prompt: Tensor) -> list[int]:
        theirs.reset()
        made = theirs.generate(prompt[0].tolist(), temp=0.0)
        return [token for token, _ in zip(made, range(bench.tokens))]

    return call


def measure(bench: Int8Bench) -> list[dict[str, Any]]:
    """Returns a row for each contender, with the seconds of all tokens."""
    config = replace(RECIPES[bench.recipe][1].model, dropout=0.0)
    torch.set_num_threads(bench.threads)
    model = GPT.from_config(config).eval()

    def copy() -> GPT:
        made = GPT.from_config(config).eval()
        made.load_state_dict(model.state_dict())
        return made

    one = bench.tokens
    contenders = {
        "fastgpt": ours(model, one), "fastgpt bf16 weights": ours(copy().bfloat16(), one),
        "fastgpt compiled": ours(torch.compile(model, dynamic=True), one),
        "fastgpt int8": ours(to_int8(copy()), one),
        "transformers": (lambda call: lambda prompt: call([prompt[0]]))(transformers(config, one)),
    }  # fmt: skip
    with suppress(ImportError):
        for dtype in ("fp32", "fp16", "q8_0"):
            contenders[f"llama.cpp {dtype}"] = llama(model, dtype, bench)
    prompt = torch.randint(256, (1, bench.prompt))
    rivals = {who: Timed(call, lambda: prompt) for who, call in contenders.items()}
    with torch.no_grad():
        samples = Timer("cpu").turns(rivals, seconds=0, rounds=bench.rounds)
    words = "thread" if bench.threads == 1 else "threads"
    about = {
        "case": f"generate/{bench.recipe}/1 prompt, {bench.threads} {words}",
        "prompts": [bench.prompt], "tokens": bench.tokens,
    }  # fmt: skip
    return [
        {**about, "implementation": who, "seconds": quantiles(found.device)}
        for who, found in samples.items()
    ]


@torch.no_grad()
def perplexities(run: str, text: Path) -> dict[str, float]:
    """Returns the perplexity per token of a text in fp32 and with int8 weights."""
    model, tokenizer = fastgpt.load(run)
    assert tokenizer is not None
    ids = torch.from_numpy(tokenizer.encode(text.read_text(encoding="utf-8")).astype("int64"))
    T = model.config.context
    rows = ids[: (len(ids) - 1) // T * T + 1]
    pairs = list(zip(rows[:-1].view(-1, T).split(16), rows[1:].view(-1, T).split(16)))
    found = {}
    for name in ("fp32", "int8"):
        model = to_int8(model) if name == "int8" else model
        losses = [F.cross_entropy(model(x).flatten(0, 1), y.flatten()) * len(x) for x, y in pairs]
        found[name] = math.exp(sum(map(float, losses)) / sum(len(x) for x, _ in pairs))
    return found


def main(argv: list[str]) -> None:
    bench = flags.parse(Int8Bench, argv, prog="python -m bench.int8")
    rows = measure(bench)
    records.show(tables.GENERATE, map(tables.generate_cells, rows))
    found = None
    if bench.run is not None and bench.text is not None:
        found = perplexities(bench.run, bench.text)
        print(found)
    print(records.Writer("cpu", perplexity=found).write("generate", *rows))


if __name__ == "__main__":
    run_command(main)
