"""Writing a model into the files of Hugging Face, or as a run of ours."""

import json
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from fastgpt import checkpoint
from fastgpt.config import Config, TrainConfig, to_json
from fastgpt.convert import vocabulary
from fastgpt.convert.families import family_for, links_of, settings_for
from fastgpt.convert.family import Links
from fastgpt.convert.source import Source, shapes
from fastgpt.storage import write_atomically

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def write_run(source: Source, target: Path) -> None:
    """Writes a run whose only checkpoint, of step 0, holds the model.

    Raises:
        UserError: the disk is full or cannot be written.
    """
    train = TrainConfig(batch_tokens=source.config.context)
    config = to_json(Config(recipe="converted", model=source.config, train=train))
    (target / "checkpoints").mkdir(parents=True)
    write_atomically(target / "config.json", config.encode())
    tokenizer = source.tokenizer
    checkpoint.save(
        target / "checkpoints",
        0,
        weights=source.weights,
        state={},
        config_json=config,
        save_tokenizer=None if tokenizer is None else tokenizer.save,
        keep=1,
    )


def write_folder(source: Source, target: Path, shard_bytes: int) -> None:
    """Writes config.json, safetensors files and tokenizer of Hugging Face.

    The source's tensors are taken out of it. Those of GPT-2 are transposed, which takes the memory
    of a file's tensors once more.

    Args:
        shard_bytes: size from which a new file is begun.

    Raises:
        UserError: no family of models can express it.
    """
    family, tokenizer = family_for(source.config), source.tokenizer
    settings = settings_for(source.config, None if tokenizer is None else tokenizer.eot_id)
    settings["torch_dtype"] = str(source.weights["wte.weight"].dtype).removeprefix("torch.")
    tensors = _tensors(source, links_of(family, source.config))
    target.mkdir(parents=True)
    (target / "config.json").write_text(json.dumps(settings, indent=1))
    _write_tensors(tensors, target, shard_bytes)
    if tokenizer is not None:
        vocabulary.write(tokenizer, target, source.config.context)


def _tensors(source: Source, links: Links) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a model under others' names, and takes them out of the source."""
    dtype = source.weights["wte.weight"].dtype
    # those that our model lacks have the shapes that they have in a model with all of them
    whole = replace(source.config, bias=True, qkv_bias=None, projection_bias=None)
    sizes = shapes(replace(whole, qk_norm_weight=whole.qk_norm))
    for ours, link in links.items():
        x = source.weights.pop(ours, None)
        if x is None:
            assert link.filler is not None
            x = torch.full(sizes[ours], link.filler, dtype=dtype)
        yield from link.theirs(x)


def _write_tensors(tensors: Iterable[tuple[str, Tensor]], folder: Path, shard_bytes: int) -> None:
    """Writes one file, or several that an index lists; their names tell how many there are."""
    shards: list[list[str]] = []
    held: dict[str, Tensor] = {}
    size = total = 0

    def flush() -> None:
        path = folder / f"{len(shards)}.safetensors"
        save_file(held, path, metadata={"format": "pt"})
        # safetensors creates files with mode 0600, whatever the umask
        shutil.copymode(folder / "config.json", path)
        shards.append(list(held))
        held.clear()

    for name, x in tensors:
        if held and size + x.nbytes > shard_bytes:
            flush()
            size = 0
        held[name] = x
        size, total = size + x.nbytes, total + x.nbytes
    flush()
    count = len(shards)
    names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    if count == 1:
        names = ["model.safetensors"]
    for i, name in enumerate(names):
        (folder / f"{i}.safetensors").rename(folder / name)
    if count > 1:
        where = {tensor: name for name, shard in zip(names, shards) for tensor in shard}
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
