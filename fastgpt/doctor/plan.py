"""Checks of a run on GPUs: its batch, its memory, its passes over the data and its time."""

import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from fastgpt.cli import configure
from fastgpt.config.config import Config
from fastgpt.config.recipes import RECIPES
from fastgpt.data.corpus import Corpus, has_shards, open_shards
from fastgpt.data.sources import resolve_source
from fastgpt.device import device
from fastgpt.doctor.checks import PROBLEM, WARNING, Finding, Found, run
from fastgpt.errors import UserError, unknown_name
from fastgpt.kernels.cross_entropy.chunks import GPU_SHARE
from fastgpt.parallel import parallelize
from fastgpt.parallel.distributed import World
from fastgpt.train.plan import largest_micro_batch

GPUS = tomllib.loads(Path(device.__file__).with_name("gpus.toml").read_text("utf-8"))
PREDICTED = GPUS.pop("predicted")


def of_run(
    recipe: str, settings: list[str], gpu: str, gpus: int, rate: float | None
) -> Iterator[Finding]:
    """Checks the run of a recipe with settings; `rate` is in tokens per second.

    Raises:
        UserError: an argument is unknown or impossible, or settings do not go together.
    """
    config = configure([recipe, "--init-from", "None", *settings])  # a recipe's is a download
    if gpu not in GPUS and not gpu.isdecimal():
        raise unknown_name("--gpu", gpu, GPUS, "its memory in GB, such as 48")
    for flag, value in (("--gpus", gpus), ("--tok-per-s", rate)):
        if value is not None and not 0 < value < float("inf"):
            raise UserError(f"{flag} is {value}: expected a number greater than 0")
    together = parallelize.model_parallel_size(config.parallel, World(size=gpus))
    world = World(size=gpus, local_size=gpus, model_parallel_size=together)
    shards = 1 if config.parallel.kind == "ddp" else parallelize.group_size(config.parallel, world)
    corpus, fault = None, list[str]()
    try:
        where = Path(resolve_source(config.data.source, fault.append)).expanduser()
        corpus = open_shards(where, tokenizer="auto") if has_shards(where) else None
    except UserError as error:
        fault.append(str(error))
    vocab = config.model.vocab_size or (corpus.tokenizer.vocab_size if corpus else 256)
    config = replace(config, model=replace(config.model, vocab_size=vocab))
    parallelize.check_combination(config, config.train.precision.replace("auto", "bf16"))
    size = len(corpus.train) if corpus else 0
    tokens = config.epochs * size if config.epochs else config.steps * config.train.batch_tokens
    yield from run(batch, config, world)
    yield from run(memory, config, world, shards, 1e9 * int(GPUS.get(gpu, gpu)))
    yield from run(data, corpus, tokens, "".join(fault))
    yield from run(time, config, gpu, gpus, rate, tokens)


def batch(config: Config, world: World) -> Found:
    train, warned, least = config.train, list[str](), config.model.context * world.dp_size
    least *= min(train.micro_batch, max(1, train.batch_tokens // least))
    cure = f"--train.batch-tokens {max(1, round(train.batch_tokens / least)) * least}"
    try:
        size = largest_micro_batch(config, world, warned.append)
    except UserError as error:
        yield str(error), (True, PROBLEM, "", cure)
        return
    times = config.global_batch // world.dp_size // size
    slow = warned, WARNING, "".join([": ", *warned]), cure
    yield f"micro-batch {size} x {times} accumulated x {world.dp_size} ranks", slow


def memory(config: Config, world: World, shards: int, size: float) -> Found:
    """Says what a step takes of a GPU, and which micro-batch fits if this one does not."""
    share, free = max(1, config.global_batch // world.dp_size), 0.9 * size
    most = min(config.train.micro_batch, share)
    usage = {n: by_part(config, n, shards, size) for n in range(most, 0, -1) if share % n == 0}
    n, parts = next(iter(usage.items()))
    peak, fits = sum(parts.values()), [n for n in usage if sum(usage[n].values()) <= free]
    cure = "--train.recompute full, or --parallel.kind fsdp on more GPUs, or a larger GPU"
    cure = f"--train.micro-batch {fits[0]}" if fits else cure
    itself = WARNING if fits and world.size == 1 else PROBLEM  # a run on one GPU takes less
    listed = ", ".join(f"{part} {bytes / 2**30:.3g}" for part, bytes in parts.items())
    yield (
        f"{peak / 2**30:.3g} of {size / 2**30:.3g} GiB for {n} sequences at a time ({listed})",
        (peak > size, itself, ": too much", cure),
        (peak > free, WARNING, ", of which CUDA and its libraries need some", cure),
    )


def by_part(config: Config, sequences: int, shards: int, gpu: float) -> dict[str, float]:
    """Estimates the bytes of a step by part, which are the most if all are there at once.

    tests/test_doctor.py compares the sum with a step whose tensors are counted one by one.

    Args:
        config: its vocabulary is known.
        sequences: micro-batch.
        shards: number of ranks that share each weight.
        gpu: bytes of the GPU, of which the chunked loss takes a share.
    """
    model, train, M = config.model, config.train, sequences * config.model.context
    C, V, F, H = model.dim, model.padded_vocab, model.ffn_width, model.num_heads
    q, k, gated = H * model.head_dim, model.kv_heads * model.head_dim, model.activation == "swiglu"
    tables = V * (1 if model.tied else 2) + model.context * (model.position == "learned")
    weights = 4.0 * C * (tables + model.num_layers * (2 * q + 2 * k + (2 + gated) * F))
    item = 4 if train.precision == "fp32" else 2
    stream = 4 if train.residual == "fp32" else item
    # further copies of queries and keys
    turned = (model.position == "rotary") + 4 * bool(model.qk_norm)
    attention = item * (2 * q + 2 * k + turned * (q + k)) + 4 * H
    all_saved = attention + item * (2 * C + (2 + gated) * F) + stream * 2 * C
    some = attention + (item + 2 * stream) * C
    layer = {"none": all_saved, "selective": some, "full": (item + stream) * C}
    loss = min(M * V * item, gpu / GPU_SHARE) + V * C * (4 + item) + M * C * item
    loss = M * V * 12.0 if config.ops.loss == "torch" else loss
    return {
        "weights": weights / shards + (weights if shards > 1 else 0),  # gathered, at most all
        "gradients": weights,
        "optimizer": 2 * weights / shards,
        "activations": M * model.num_layers * layer[train.recompute]
        + (weights / 2 if item == 2 else 0),  # autocast's copies
        "logits and loss": max(loss, M * all_saved if train.recompute != "none" else 0),
    }


def data(corpus: Corpus | None, tokens: float, said: str) -> Found:
    fault, _, cure = said.rpartition(": ")  # which may end in words that lead to the cure
    what = fault.partition(". ")[0] or "its size is unknown before a run prepares it"
    if corpus:
        size = len(corpus.train)
        what = f"{tokens / size:,.2f} passes over {size:,} tokens of {corpus.path}"
    yield what, (said, PROBLEM, "", cure)


def time(config: Config, gpu: str, gpus: int, rate: float | None, tokens: float) -> Found:
    source, cure = "as given", "--tok-per-s X, as the log of a short run shows it"
    known = predicted(config, gpu) if rate is None else 0
    if known:
        rate = gpus * known
        source = f"predicted, not measured: {gpus} x docs/performance.md's {known:,.0f} of one GPU"
    found = "unknown, as the data's size is" if rate else f"unknown: no prediction for {gpu}"
    if rate and tokens:
        days = f"{tokens / rate / 86400:,.3g} days"
        found = f"{days} for {tokens:,.0f} tokens at {rate:,.0f}/s, {source}"
    doubt = known or not rate
    yield found, (doubt, WARNING, "" if rate else f" with {config.recipe}", cure)


def predicted(config: Config, gpu: str) -> float:
    """Returns the tokens per second predicted of one GPU; 0 if the network is not the recipe's."""
    model = RECIPES[config.recipe][1].model
    same = replace(config.model, vocab_size=model.vocab_size) == model
    return PREDICTED.get(config.recipe, {}).get(gpu, 0) if same else 0
