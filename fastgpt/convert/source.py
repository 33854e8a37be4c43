"""Loading a trained model: a run, a checkpoint, or files of other programs."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from fastgpt.checkpoint import checkpoint, tensors
from fastgpt.checkpoint.tensors import Weights, in_memory
from fastgpt.config.config import OpsConfig
from fastgpt.config.model import ModelConfig
from fastgpt.convert.families import Fields, config_from, names_of, tensors_of, to_ours, to_theirs
from fastgpt.convert.foreign import read_llmc, read_nanogpt
from fastgpt.convert.gguf_reader import read_gguf
from fastgpt.convert.saved import saved_config
from fastgpt.data.tokenizers import TOKENIZER_FILE, Tokenizer, load_tokenizer
from fastgpt.errors import UserError, reason, shown
from fastgpt.files import parse_json
from fastgpt.model.build import build_model
from fastgpt.model.gpt import GPT
from fastgpt.ops import tables
from fastgpt.terminal import print_line

HUB_NAME = re.compile(r"gpt2(-medium|-large|-xl)?|distilgpt2|[\w.-]+/[\w.-]+")
"""Names that are looked up on the hub: OWNER/MODEL, and GPT-2's old names."""
FILES = ("*.safetensors", "*.json", "*.jinja")
"""Files at the top of a hub repository that are downloaded: no pickles."""
READERS = {".pt": read_nanogpt, ".bin": read_llmc}
HF_FILES = ("chat_template.jinja", "tokenizer_config.json", "generation_config.json")
"""Files of Hugging Face with a chat template or the ends of an answer, kept as they are."""
TOKEN_IDS = ("bos_token_id", "eos_token_id")
"""Fields of a config.json that a run keeps, as nothing else says them; the second may be a list."""
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
"""Ends of the names of tensors of Hugging Face that hold no weights."""


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model of any format, opened: its settings, weights and tokenizer."""

    path: Path
    config: ModelConfig
    weights: Weights
    """By our names, in the dtype of the file, without padding of the vocabulary."""
    tokenizer: Tokenizer | None = None
    warnings: list[str] = field(default_factory=list)
    hf_files: dict[str, str] = field(default_factory=dict)
    """Text of the files `HF_FILES` by name, and of config.json the fields `TOKEN_IDS`."""

    def __post_init__(self) -> None:
        if self.tokenizer is None:
            return
        stops = set()
        for name in ("config.json", "generation_config.json"):
            settings = parse_object(self.hf_files.get(name, "{}"), self.path / name)
            ids = token_ids(settings, name).get("eos_token_id", [])
            stops.update(ids if isinstance(ids, list) else [ids])
        self.tokenizer.stop_ids = frozenset(stops)

    def known_tokenizer(self) -> Tokenizer:
        """Returns the tokenizer; raises `UserError` if there is none."""
        if self.tokenizer is None:
            raise UserError(
                f"{self.path} has no tokenizer: expected tokenizer.json beside the model"
            )
        return self.tokenizer

    def build_gpt(self, device: str = "cpu", asked: OpsConfig | None = None) -> GPT:
        """Builds the model in evaluation mode, in fp32, with the ops asked for."""
        model = build_model(self.config, tables.select(asked or OpsConfig(), device))
        state = model.state_dict()
        for name, x in self.weights.items():  # one at a time: they are not in memory twice
            state[name].copy_(x)
        return model.to(device).eval()


def load(
    source: str | Path, device: str = "cpu", asked: OpsConfig | None = None
) -> tuple[GPT, Tokenizer | None]:
    """Loads a model, in evaluation mode and fp32, and its tokenizer.

    Args:
        source: folder of a run, whose newest valid checkpoint is used, of a checkpoint, or of a
            Hugging Face model (GPT-2, Llama, Qwen3), the name of one on the hub, nanoGPT's
            ckpt.pt, a .bin file of llm.c or a .gguf file of llama.cpp (Llama, Qwen3).
        device: `cpu`, `cuda`, `xpu` or `mps`.
        asked: implementations of the model's ops; by default those that suit the device.

    Returns:
        tuple[GPT, Tokenizer | None]: the tokenizer is None if the folder has none.

    Raises:
        UserError: no such model exists, a file is damaged, or our model cannot express it.

    >>> model, tokenizer = fastgpt.load("runs/mine")
    >>> model.generate(torch.tensor([[1, 2]]), max_new_tokens=3).shape
    torch.Size([1, 5])
    """
    found = open_model(source)
    return found.build_gpt(device, asked), found.tokenizer


def open_model(source: str | Path) -> OpenedModel:
    """Reads a model as `load` does, without building it, and prints its warnings."""
    found = read(str(source))
    for warning in found.warnings:
        print_line(f"warning: {warning}")
    if found.tokenizer is None:
        print_line(f"warning: {found.path} has no tokenizer: the model works on token ids only")
    return found


def read(source: str) -> OpenedModel:
    """Reads a model, whatever it was written by.

    Args:
        source: as for `load`.

    Raises:
        UserError: the model is missing, cannot be a GPT of ours, or has a damaged file.
    """
    path = Path(source).expanduser()
    if _is_run(path):
        return _of_run(path)
    if not path.exists():
        path = _downloaded(source)
    if (path / "config.json").is_file() or (path.is_file() and path.suffix == ".gguf"):
        return _of_hf(path)
    if path.is_file() and path.suffix in READERS:
        config, weights = READERS[path.suffix](path)
        return OpenedModel(path, config, _checked(path, in_memory(weights), tensors_of(config)))
    raise UserError(
        f"{source} is not a model: expected a run or checkpoint, a folder with config.json and"
        " safetensors files, or a file of nanoGPT (.pt), llm.c (.bin) or llama.cpp (.gguf)"
    )


def read_header(source: str) -> ModelConfig:
    """Reads the settings of a model that `read` opens; of one on the hub it downloads them alone.

    Raises:
        UserError: the model is missing, or cannot be a GPT of ours.
    """
    path = Path(source).expanduser()
    if _is_run(path):
        return saved_config(path).model
    if not path.exists():
        path = _downloaded(source, ["config.json"])
    if (path / "config.json").is_file():
        return config_from(_json(path / "config.json"))[0]
    return read(source).config


def _is_run(path: Path) -> bool:
    return (path / "checkpoint.json").is_file() or (path / "checkpoints").is_dir()


def _of_run(path: Path) -> OpenedModel:
    found, complaints = checkpoint.find(str(path), state=False)
    path, config = found.path, saved_config(found.path).model
    return OpenedModel(
        path=path,
        config=config,
        weights=_checked(path, found.weights, tensors_of(config)),
        tokenizer=_tokenizer(path),
        warnings=complaints,
        hf_files=read_hf_files(path / "huggingface.json"),
    )


def _tokenizer(folder: Path) -> Tokenizer | None:
    return load_tokenizer(folder) if (folder / TOKENIZER_FILE).exists() else None


def read_hf_files(path: Path) -> dict[str, str]:
    """Reads the files that a conversion kept in `huggingface.json`, if any: names and texts."""
    found = _json(path) if path.exists() else {}
    if not all(isinstance(text, str) for text in found.values()):
        raise UserError(f"{path} is damaged: expected names of files and their texts")
    return found


def _downloaded(name: str, files: Sequence[str] = FILES) -> Path:
    """Returns the folder of a model of the hub, with these files downloaded if they were not."""
    local = name.startswith("runs/") or Path(name).suffix in (*READERS, ".gguf")
    if local or not HUB_NAME.fullmatch(name) or ("/" in name and Path(name).parent.is_dir()):
        raise UserError(
            f"{name} does not exist: expected a run such as runs/NAME, a folder or file, or a"
            " model's name on the hub such as gpt2 or OWNER/NAME"
        )
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, allow_patterns=[*files], ignore_patterns=["*/*"]))
    except Exception as error:  # many kinds: no package, no network, no such name, no permission
        raise UserError(
            f"{name} is not a folder here, and cannot be had from the hub ({reason(error)}): put"
            " the model's config.json, *.safetensors and tokenizer.json into a folder and pass that"
        ) from error


# --- JSON -----------------------------------------------------------------------------------------


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {reason(error)}") from error


def _json(path: Path) -> Fields:
    return parse_object(_text(path), path)


def parse_object(text: str, path: Path) -> Fields:
    """Parses an object of JSON; raises `UserError`, with the path, if it is something else."""
    try:
        content = parse_json(text)
    except ValueError as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds {type(content).__name__}: expected an object")
    return content


def token_ids(settings: Fields, where: str = "config.json") -> Fields:
    """Returns the fields `TOKEN_IDS` of a config.json, without those that are missing or null."""
    found = {name: settings[name] for name in TOKEN_IDS if settings.get(name) is not None}
    for name, ids in found.items():
        if not all(type(x) is int for x in (ids if isinstance(ids, list) else [ids])):
            raise UserError(f"{where}: {name} is {shown(ids)}: expected an id or a list of ids")
    return found


# --- Hugging Face ---------------------------------------------------------------------------------


def _of_hf(path: Path) -> OpenedModel:
    """Opens a folder, or a GGUF file, which is read as a folder."""
    if path.is_file():
        config, stored, tokenizer, hf_files = read_gguf(path)
        unknown = []
    else:
        settings = _json(path / "config.json")
        config, unknown = config_from(settings)
        stored, tokenizer = _stored(path, config), _tokenizer(path)
        hf_files = {name: _text(path / name) for name in HF_FILES if (path / name).is_file()}
        if ids := token_ids(settings):
            hf_files["config.json"] = json.dumps(ids)
    assert config.vocab_size is not None
    if tokenizer is not None and config.vocab_size < tokenizer.vocab_size:
        raise UserError(
            f"{path}: the tokenizer has {tokenizer.vocab_size:,} tokens, and config.json has"
            f" vocab_size {config.vocab_size:,}: expected at least as many"
        )
    head, table = "lm_head.weight", names_of("wte.weight", config)[0]
    if (
        config.tied
        and {head, table} <= stored.plan.keys()
        and torch.equal(stored[head], stored[table])
    ):
        del stored.plan[head]  # the embedding once more
    expected = to_theirs(in_memory(tensors_of(config)), config).plan
    weights = to_ours(_checked(path, stored, expected), config)
    warnings = [f"config.json: unknown and ignored: {', '.join(unknown)}"] if unknown else []
    return OpenedModel(path, config, weights, tokenizer, warnings, hf_files)


def _stored(path: Path, config: ModelConfig) -> Weights:
    """Opens the tensors of a folder, in one file or several."""
    prefix = names_of("wte.weight", config)[0].split(".")[0]  # GPT-2's files on the hub lack it
    plan: dict[str, Tensor] = {}
    where: dict[str, tuple[Weights, str]] = {}
    for file in _files(path):
        weights = tensors.read(file)
        for short, x in weights.plan.items():
            name = short if short.startswith((f"{prefix}.", "lm_head.")) else f"{prefix}.{short}"
            if name in plan:
                raise UserError(f"{name} is in two files: one is {file}")
            if not name.endswith(BUFFERS):
                plan[name], where[name] = x, (weights, short)
    return Weights(plan, lambda name: where[name][0][where[name][1]])


def _files(path: Path) -> list[Path]:
    """Returns the safetensors files of a folder."""
    index, single = path / "model.safetensors.index.json", path / "model.safetensors"
    if single.is_file() or not index.is_file():  # transformers, too, prefers it to an index
        return [single]
    where = _json(index).get("weight_map")
    if not isinstance(where, dict) or not where:
        raise UserError(f"{index} has the weight_map {shown(where)}: expected names and files")
    outside = [x for x in where.values() if type(x) is not str or Path(x).name != x]
    if outside:
        raise UserError(f"{index} names {shown(outside[0])}: expected files of the same folder")
    return sorted({path / name for name in where.values()})


def _checked(path: Path, stored: Weights, expected: dict[str, Tensor]) -> Weights:
    """Returns tensors that have the names and shapes expected, and the values of constants.

    Raises:
        UserError: one is missing, is another one, or belongs to no part of our model.
    """
    for name, x in expected.items():
        if name not in stored.plan:  # `in stored` would read it
            raise UserError(f"{path} has no tensor {name}, which its settings ask for")
        part = stored.plan[name]
        if not part.is_floating_point():
            raise UserError(f"{path}: {name} holds {part.dtype}: expected floats")
        if part.shape != x.shape:
            found, shape = tuple(part.shape), tuple(x.shape)
            raise UserError(f"{path}: {name} has the shape {found}: expected {shape}")
        if not x.is_meta and not (stored[name] == x).all():
            raise UserError(
                f"{path}: {name} is not constant, although config.json says under `fastgpt` that"
                " the model has no such tensor"
            )
    for name in sorted(stored.keys() - expected.keys()):
        raise UserError(f"{path}: {name} belongs to no part of the model that it describes")
    return stored
