"""Writing a model into the files of Hugging Face, or as a run of ours."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from fastgpt.checkpoint import checkpoint, tensors
from fastgpt.config.config import CONVERTED, Config, TrainConfig, to_json
from fastgpt.convert.architecture import HFConfig, TensorMap
from fastgpt.convert.architectures import architecture_for, settings_for, tensor_maps
from fastgpt.convert.source import HF_FILES, TOKEN_IDS, OpenedModel, parse_object, token_ids
from fastgpt.data.tokenizers import Tokenizer
from fastgpt.files import write_atomically
from fastgpt.sampling.chat import text_elsewhere


def write_run(source: OpenedModel, target: Path) -> None:
    """Writes a run whose only checkpoint, of step 0, holds the model.

    Raises:
        UserError: the disk is full or cannot be written.
    """
    train = TrainConfig(batch_tokens=source.config.context)
    config = to_json(Config(recipe=CONVERTED, model=source.config, train=train))
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
        huggingface_json=json.dumps(source.hf_files) if source.hf_files else None,
    )


def write_folder(source: OpenedModel, target: Path, shard_bytes: int) -> None:
    """Writes config.json, safetensors files and tokenizer of Hugging Face.

    Args:
        shard_bytes: size from which a new file is begun.

    Raises:
        UserError: no architecture can express it.
    """
    architecture, tokenizer = architecture_for(source.config), source.tokenizer
    settings = settings_for(source.config)
    settings |= begin_and_end(source)
    settings["torch_dtype"] = str(source.weights.plan["wte.weight"].dtype).removeprefix("torch.")
    target.mkdir(parents=True)
    (target / "config.json").write_text(json.dumps(settings, indent=1))
    _write_tensors(source, tensor_maps(architecture, source.config), target, shard_bytes)
    if tokenizer is not None:
        write_tokenizer(tokenizer, target, source.config.context)
    files = source.hf_files
    for name in files.keys() & HF_FILES:
        template = text_elsewhere(files, tokenizer) if name == "chat_template.jinja" else None
        (target / name).write_text(template or files[name], encoding="utf-8")


def write_tokenizer(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json`, for texts of up to `context` tokens."""
    settings: HFConfig = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    if tokenizer.eot_id is not None:
        end = tokenizer.decode([tokenizer.eot_id])
        settings |= {"bos_token": end, "eos_token": end}
    tokenizer.save(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")


def begin_and_end(source: OpenedModel) -> HFConfig:
    """Returns the fields `TOKEN_IDS`: the model's own, else the tokenizer's end of text."""
    tokenizer, config = source.tokenizer, source.hf_files.get("config.json", "{}")
    ids: HFConfig = dict.fromkeys(TOKEN_IDS, None if tokenizer is None else tokenizer.eot_id)
    return ids | token_ids(parse_object(config, source.path / "huggingface.json"))


def renamed(
    weights: Mapping[str, Tensor], maps: dict[str, TensorMap], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a model under others' names."""
    for name, x in maps.items():
        constant = x.constant
        tensor = weights[name] if constant is None else torch.full(x.shape, constant, dtype=dtype)
        yield from x.theirs(tensor)


def _write_tensors(
    source: OpenedModel, maps: dict[str, TensorMap], folder: Path, shard_bytes: int
) -> None:
    """Writes one file, or several that an index lists; their names tell how many there are."""
    dtype = source.weights.plan["wte.weight"].dtype
    plan, size = dict(renamed(source.weights.plan, maps, dtype)), 0
    shards: list[dict[str, Tensor]] = [{}]
    for name, x in plan.items():
        if shards[-1] and size + x.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = x
        size += x.nbytes
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        names = ["model.safetensors"]
    values = (x for _, x in renamed(source.weights, maps, dtype))
    for name, shard in zip(names, shards):
        tensors.write(folder / name, dict(zip(shard, values)))
    if len(shards) > 1:
        where = {tensor: name for name, shard in zip(names, shards) for tensor in shard}
        total = sum(x.nbytes for x in plan.values())
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
