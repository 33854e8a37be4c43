"""Checks of a run on GPUs: its batch, its memory, its passes over the data and its time."""

import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from fastgpt import cli
from fastgpt.config.config import Config
from fastgpt.data.corpus import MANIFEST, has_shards, read_manifest
from fastgpt.data.shards import Tokens
from fastgpt.device import device
from fastgpt.doctor.checks import PROBLEM, WARNING, Finding, Found, run
from fastgpt.errors import UserError, unknown_name
from fastgpt.kernels.cross_entropy.chunks import GPU_SHARE
from fastgpt.kernels.runtime import H100_BYTES
from fastgpt.parallel import parallelize
from fastgpt.parallel.distributed import World
from fastgpt.require_torch import ROOT
from fastgpt.train.data import GPT2_TOKENS, resolve_source
from fastgpt.train.micro_batch import largest_micro_batch

GPUS = tomllib.loads(Path(device.__file__).with_name("gpus.toml").read_text("utf-8"))


def of_run(
    recipe: str, settings: list[str], gpu: str, gpus: int | None, rate: float | None
) -> Iterator[Finding]:
    """Checks the run of a recipe, or of a file of settings; `rate` is in tokens per second.

    Raises:
        UserError: an argument is unknown or impossible, or settings do not go together.
    """
    gpu = gpu.lower().removeprefix("rtx").strip(" -")
    if gpu and gpu not in GPUS and not gpu.isdecimal():
        raise unknown_name("--gpu", gpu, GPUS, "its memory in GB, such as 48")
    for flag, value in (("--gpus", gpus), ("--tok-per-s", rate)):
        if value is not None and not 0 < value < float("inf"):
            raise UserError(f"{flag} is {value}: expected a number greater than 0")
    here = torch.cuda.is_available()
    size = 10**9 * int(GPUS.get(gpu, gpu)) if gpu else torch.cuda.mem_get_info()[1] if here else 0
    here = device.device_name("cuda" if here else "cpu")
    gpu = gpu if gpu in GPUS else f"{gpu} GB" if gpu else here
    file = ["--config"] if recipe.endswith((".yaml", ".yml")) else []
    if not any(x.startswith(("--init", "--resume")) for x in settings):
        settings = [*settings, "--init-from", "None"]  # which a recipe would download
    config = cli.parse([*file, recipe, *settings])
    ranks = gpus or torch.cuda.device_count() or 1
    together = parallelize.non_dp_size(config.parallel, World(size=ranks))
    world = World(size=ranks, local_size=ranks, non_dp_size=together)
    tokens, vocab, (source, *faults) = data_set(config)
    model = replace(config.model, vocab_size=config.model.vocab_size or vocab)
    config = replace(config, model=model)
    total = config.steps * config.train.batch_tokens
    total = tokens * config.epochs if config.epochs else total
    if tokens:
        source = f"{total / tokens:,.2f} passes over {tokens:,} tokens of {source}"
    yield from run("batch", batch(config, world))
    yield from run("memory", memory(config, world, gpu, size))
    yield from run("data", iter([(source, *faults)]))
    yield from run("time", time(config, ranks, gpu, rate, total))


def batch(config: Config, world: World) -> Found:
    train, warned, least = config.train, list[str](), config.model.context * world.dp_size
    least *= min(train.micro_batch, max(1, train.batch_tokens // least))
    cure = f"--train.batch-tokens {max(1, round(train.batch_tokens / least)) * least}"
    try:
        size = largest_micro_batch(config, world, warned.append)
        parallelize.check_combination(config, train.precision.replace("auto", "bf16"))
    except UserError as error:
        other = "" if "--train.batch-tokens" in str(error) else "change this setting"
        yield str(error), (True, PROBLEM, "", other or cure)
        return
    times = config.global_batch // world.dp_size // size
    slow = warned, WARNING, "".join([": ", *warned]), cure
    yield f"micro-batch {size} x {times} accumulated x {world.dp_size} ranks", slow


def memory(config: Config, world: World, gpu: str, size: float) -> Found:
    """Says what a step takes, and which micro-batch fits if this one does not."""
    share, train = max(1, config.global_batch // world.dp_size), config.train
    odd, most = config.global_batch % world.dp_size, min(train.micro_batch, share)
    sizes = [n for n in range(most, 0, -1) if odd or share % n == 0]
    sharded = parallelize.shards_weights(config.parallel, world)
    shards = parallelize.group_size(config.parallel, world) if sharded else 1
    parts = by_part(config, sizes[0], shards, size or H100_BYTES)
    peak, free = sum(parts.values()), 0.9 * size
    fits = [n for n in sizes if sum(by_part(config, n, shards, size).values()) <= free]
    cure = "--train.recompute full, or --parallel.kind fsdp on more GPUs, or a larger GPU"
    cure = f"--train.micro-batch {fits[0]}" if fits else cure
    itself = WARNING if fits and world.size == 1 else PROBLEM  # a run on one GPU takes less
    listed = ", ".join(f"{part} {n / 2**30:.3g}" for part, n in parts.items())
    more = train.recompute != "none" and train.compile != "off" and 1.5 * peak > free
    yield (
        f"{peak / 2**30:.3g} GiB for {sizes[0]} sequences at a time ({listed})"
        + (f" of {size / 2**30:.3g} on {gpu}" if size else "; --gpu says whether that fits"),
        (size and peak > size, itself, ": too much", cure),
        (size and peak > free, WARNING, ", of which CUDA and its libraries need some", cure),
        (size and more, WARNING, "; compiled it may take half as much again", cure),
    )


def by_part(config: Config, sequences: int, shards: int, gpu: float) -> dict[str, float]:
    """Estimates the bytes of a step by part, which are the most if all are there at once.

    `bench.memory` counts each tensor of a step; a test compares both.

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
    turned = (model.position == "rotary") + 4 * model.qk_norm  # further copies of queries and keys
    attention = item * (2 * q + 2 * k + turned * (q + k)) + 4 * H
    masks = sum(C for place in ("residual", "feed_forward") if model.dropout_at(place))
    whole = attention + item * (2 * C + (2 + gated) * F) + stream * 2 * C + masks
    some = attention + (item + 2 * stream) * C
    layer = {"none": whole, "selective": some, "full": (item + stream) * C}
    again = 0.0 if train.recompute == "none" else M * whole
    loss = min(M * V * item, gpu / GPU_SHARE) + V * C * (4 + item) + M * C * item
    loss = M * V * 12.0 if config.ops.loss == "torch" else loss
    copies = weights / 2 if item == 2 else 0.0  # autocast's
    return {
        "weights": weights / shards + (weights if shards > 1 else 0),  # gathered, at most all
        "gradients": weights,
        "optimizer": 2 * weights / shards,
        "activations": M * model.num_layers * layer[train.recompute] + copies,
        "logits and loss": max(loss, again),
    }


def data_set(config: Config) -> tuple[int, int, tuple]:
    """Returns the number of training tokens, 0 if unknown; the vocabulary; and what was found."""
    warned: list[str] = []
    try:
        where = Path(resolve_source(config.data.source, warned.append)).expanduser()
    except UserError as error:
        found, _, cure = str(error).partition(": ")
        return 0, 256, (found, (True, PROBLEM, "", cure))
    if (where / MANIFEST).is_file():
        manifest = read_manifest(where)
        return manifest["splits"]["train"]["tokens"], manifest["vocab_size"], (where,)
    if has_shards(where):
        return len(Tokens(sorted(where.glob("*train*.bin")))), GPT2_TOKENS, (where,)
    found, _, cure = "".join(warned).rpartition(". To prepare real text: ")
    fault = warned, WARNING, f"; {found}", cure
    return 0, 256, (f"{where}, whose size is unknown before a run prepares it", fault)


def time(config: Config, ranks: int, gpu: str, rate: float | None, tokens: float) -> Found:
    source = "as given"
    if rate is None:
        rate, source = recorded(config, gpu)
        rate, source = rate * ranks, source + f", times {ranks}" * (ranks > 1)
    if not tokens:
        yield ("unknown, as it depends on the data's size",)
    elif not rate:
        found = f"unknown, as there is no record of {config.recipe} on {gpu}"
        yield found, (True, WARNING, "", "--tok-per-s X, as the log of a short run shows it")
    else:
        days = f"{tokens / rate / 86400:,.3g} days"
        yield (f"{days} for {tokens:,.0f} tokens at {rate:,.0f} tokens/s, {source}",)


def recorded(config: Config, gpu: str) -> tuple[float, str]:
    """Returns the tokens per second of the newest committed record, 0 if there is none."""
    newest, found = "", (0.0, "")
    for path in (ROOT / "bench" / "results").glob("*/*.jsonl"):
        for row in map(json.loads, path.read_text("utf-8").splitlines()):
            if row["kind"] == "step" and row["implementation"] == "fastgpt" and row["run"] > newest:
                on, B, T = row["device"], row["shape"]["B"], row["shape"]["T"]
                alike = re.search(rf"\b{re.escape(gpu)}\b", on, re.IGNORECASE)
                if alike and (row["recipe"], T) == (config.recipe, config.model.context):
                    newest, per_s = row["run"], B * T / row["seconds"]["p50"]
                    found = per_s, f"the record of {newest[:10]} on {on}"
    return found
