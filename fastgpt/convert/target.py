"""Writing a model into the files of Hugging Face, or as a run of ours."""

import json
from pathlib import Path

from fastgpt.checkpoint import checkpoint, tensors
from fastgpt.checkpoint.tensors import Weights
from fastgpt.config.config import CONVERTED, Config, TrainConfig, to_json
from fastgpt.convert.families import Fields, settings_for, to_theirs
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
        UserError: no family can express it.
    """
    settings, tokenizer = settings_for(source.config) | begin_and_end(source), source.tokenizer
    settings["torch_dtype"] = str(source.weights.plan["wte.weight"].dtype).removeprefix("torch.")
    target.mkdir(parents=True)
    (target / "config.json").write_text(json.dumps(settings, indent=1))
    _write_tensors(to_theirs(source.weights, source.config), target, shard_bytes)
    if tokenizer is not None:
        write_tokenizer(tokenizer, target, source.config.context)
    files = source.hf_files
    for name in files.keys() & HF_FILES:
        template = text_elsewhere(files, tokenizer) if name == "chat_template.jinja" else None
        (target / name).write_text(template or files[name], encoding="utf-8")


def write_tokenizer(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json`, for texts of up to `context` tokens."""
    settings: Fields = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    if tokenizer.eot_id is not None:
        end = tokenizer.decode([tokenizer.eot_id])
        settings |= {"bos_token": end, "eos_token": end}
    tokenizer.save(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")


def begin_and_end(source: OpenedModel) -> Fields:
    """Returns the fields `TOKEN_IDS`: the model's own, else the tokenizer's end of text."""
    tokenizer, config = source.tokenizer, source.hf_files.get("config.json", "{}")
    ids: Fields = dict.fromkeys(TOKEN_IDS, None if tokenizer is None else tokenizer.eot_id)
    return ids | token_ids(parse_object(config, source.path / "huggingface.json"))


def _write_tensors(weights: Weights, folder: Path, shard_bytes: int) -> None:
    """Writes one file, or several that an index lists; one file is in memory at a time."""
    from huggingface_hub import split_torch_state_dict_into_shards

    plan = {name: x.clone() for name, x in weights.plan.items()}  # of views it counts the whole
    found = split_torch_state_dict_into_shards(
        plan, filename_pattern="model{suffix}.safetensors", max_shard_size=shard_bytes
    )
    for name, members in found.filename_to_tensors.items():
        tensors.write(folder / name, {x: weights[x] for x in members})
    if found.is_sharded:
        index = {"metadata": found.metadata, "weight_map": found.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
