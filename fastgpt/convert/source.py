"""Reading a model from a run, a checkpoint, or files of Hugging Face, nanoGPT or llm.c."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from fastgpt.checkpoint import checkpoint, tensors
from fastgpt.checkpoint.tensors import Weights
from fastgpt.config.config import OpsConfig
from fastgpt.config.model import ModelConfig
from fastgpt.config.saved import saved_config
from fastgpt.convert.families import config_from, tensor_maps
from fastgpt.convert.family import Family, Settings
from fastgpt.convert.llmc import read_llmc
from fastgpt.convert.nanogpt import read_nanogpt
from fastgpt.data.tokenizers import TOKENIZER_FILE, Tokenizer, load_tokenizer
from fastgpt.errors import UserError, counted, reason, shown
from fastgpt.files import parse_json
from fastgpt.model.build import build_model
from fastgpt.model.gpt import GPT
from fastgpt.ops import tables

HUB_NAME = re.compile(r"gpt2(-medium|-large|-xl)?|distilgpt2|[\w.-]+/[\w.-]+")
"""Names that are looked up on the hub: those of an owner's model, and the old ones of GPT-2."""
FILES = ("*.safetensors", "*.json", "*.jinja")
"""Files of a hub repository that are downloaded, but not those of its folders: no pickles."""

SIDECARS = (
    "generation_config.json", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.jinja",
)  # fmt: skip
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model of any format, opened: its settings, weights and tokenizer."""

    path: Path
    kind: str
    """`run` (a run or checkpoint of ours), `hf` (Hugging Face), `nanogpt` or `llmc`."""
    config: ModelConfig
    weights: Weights
    """By our names, in the dtype of the file, without padding of the vocabulary."""
    tokenizer: Tokenizer | None
    warnings: list[str] = field(default_factory=list)
    hf_sidecars: dict[str, str] = field(default_factory=dict)
    """Files of Hugging Face that fastgpt does not interpret, by name, with their text; of
    config.json only the fields `IDS`."""

    def complaints(self) -> list[str]:
        """Returns the warnings, and one if there is no tokenizer."""
        lacks = f"{self.path} has no tokenizer: the model works on token ids only"
        return [*self.warnings, *[lacks] * (self.tokenizer is None)]

    def build_gpt(self, device: str = "cpu", asked: OpsConfig | None = None) -> GPT:
        """Builds the model in evaluation mode, in fp32, with the ops asked for."""
        selected = tables.select(asked or OpsConfig(), device)
        model = build_model(self.config, selected)
        state = model.state_dict()
        with _reading(self.path):  # a training run may have removed the checkpoint
            for name, x in self.weights.items():  # one at a time: they are not in memory twice
                state[name].copy_(x)
        return model.to(device).eval()


def read(source: str) -> OpenedModel:
    """Reads a model, whatever it was written by.

    Args:
        source: folder of a run, whose newest valid checkpoint is taken, of a checkpoint or of a
            Hugging Face model, or the name of one on the hub, such as `gpt2`; a `.pt` file of
            nanoGPT or a `.bin` file of llm.c.

    Raises:
        UserError: there is no such model, it cannot be a GPT of ours, or a file is damaged.
    """
    path = Path(source).expanduser()
    if (path / "checkpoint.json").is_file() or (path / "checkpoints").is_dir():
        return _of_run(path)
    if (path / "config.json").is_file():
        return _of_folder(path)
    if path.is_file() and path.suffix in READERS:
        kind, reader = READERS[path.suffix]
        config, weights = reader(path)
        return _checked(OpenedModel(path, kind, config, tensors.in_memory(weights), None))
    if path.exists():
        raise UserError(
            f"{source} is no model: expected a run or checkpoint, a folder with config.json and"
            " safetensors files, or a file of nanoGPT (.pt) or llm.c (.bin)"
        )
    return _of_folder(_downloaded(source))


READERS = {".pt": ("nanogpt", read_nanogpt), ".bin": ("llmc", read_llmc)}


def _checked(source: OpenedModel) -> OpenedModel:
    """Raises `UserError` if a model lacks a tensor, or has another one or another shape."""
    expected = shapes(source.config)
    found = source.weights.plan
    for name in sorted(expected.keys() | found.keys()):
        if name not in expected or name not in found:
            what = "no" if name in expected else "an unknown"
            raise UserError(f"{source.path} has {what} tensor {name}")
        if not found[name].is_floating_point():
            raise UserError(f"{source.path}: {name} holds {found[name].dtype}: expected floats")
        if found[name].shape != expected[name]:
            raise UserError(
                f"{source.path}: {name} has the shape {tuple(found[name].shape)}:"
                f" expected {tuple(expected[name])}"
            )
    return source


def _of_run(path: Path) -> OpenedModel:
    found, complaints = checkpoint.find(str(path), state=False)
    saved, others = found.path / "tokenizer.json", found.path / "huggingface.json"
    return _checked(
        OpenedModel(
            path=found.path,
            kind="run",
            config=saved_config(found.path).model,
            weights=found.weights,
            tokenizer=load_tokenizer(saved) if saved.exists() else None,
            warnings=complaints,
            hf_sidecars=read_sidecars(others),
        )
    )


def read_sidecars(path: Path) -> dict[str, str]:
    """Reads the files that a conversion kept in `huggingface.json`, if any: names and texts."""
    found = _json(path) if path.exists() else {}
    if not all(isinstance(text, str) for text in found.values()):
        raise UserError(f"{path} is damaged: expected names of files and their texts")
    return found


def _downloaded(name: str) -> Path:
    """Returns the folder of a model of the hub, downloaded if it was not yet."""
    local = name.startswith("runs/") or Path(name).suffix in READERS
    if local or not HUB_NAME.fullmatch(name) or ("/" in name and Path(name).parent.is_dir()):
        raise UserError(
            f"{name} does not exist: expected a run such as runs/NAME, a folder or file, or a"
            " model's name on the hub such as gpt2 or OWNER/NAME"
        )
    try:
        from huggingface_hub import snapshot_download
    except ModuleNotFoundError as error:
        raise UserError(
            f"{name} does not exist; as a name on the hub it needs the package huggingface_hub"
        ) from error
    try:
        return Path(snapshot_download(name, allow_patterns=list(FILES), ignore_patterns=["*/*"]))
    except Exception as error:  # many kinds: no network, no such name, no permission
        raise UserError(
            f"{name} is no folder here, and cannot be had from the hub ({reason(error)}): put the"
            " model's config.json, *.safetensors and tokenizer.json into a folder and pass that"
        ) from error


# --- Hugging Face ---------------------------------------------------------------------------------


def _of_folder(path: Path) -> OpenedModel:
    settings = _json(path / "config.json")
    config, family, unknown = config_from(settings)
    warnings = [f"config.json: unknown and ignored: {', '.join(unknown)}"] if unknown else []
    tokenizer = load_tokenizer(path) if (path / TOKENIZER_FILE).is_file() else None
    assert config.vocab_size is not None
    if tokenizer is not None and config.vocab_size < tokenizer.vocab_size:
        raise UserError(
            f"{path}: the tokenizer has {tokenizer.vocab_size:,} tokens, and config.json has"
            f" vocab_size {config.vocab_size:,}: expected at least as many"
        )
    weights = _folder_weights(path, family, config)
    ids = {name: settings[name] for name in IDS if name in settings}
    sidecars = {"config.json": json.dumps(ids)}
    for name in SIDECARS:
        if (path / name).is_file():
            with _reading(path / name):
                sidecars[name] = (path / name).read_text(encoding="utf-8")
    return OpenedModel(path, "hf", config, weights, tokenizer, warnings, sidecars)


def _json(path: Path) -> Settings:
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds {type(content).__name__}: expected an object")
    return content


def shapes(config: ModelConfig) -> dict[str, torch.Size]:
    """Returns the shapes of a model's weights, without padding of the vocabulary."""
    try:
        with torch.device("meta"):
            model = build_model(config, tables.select(OpsConfig(), "cpu"))
    except RuntimeError as error:
        raise UserError(f"the model's sizes are too large: {reason(error)}") from error
    return {name: x.shape for name, x in model.state_dict().items()}


def _folder_weights(path: Path, family: Family, config: ModelConfig) -> Weights:
    """Returns the tensors of a folder under our names.

    Raises:
        UserError: one is missing, has another shape, or belongs to no part of our model.
    """
    stored, where = _stored(path, family.prefix)
    maps, expected, plan = tensor_maps(family, config), shapes(config), {}
    for ours, tensor_map in maps.items():
        if missing := [name for name in tensor_map.names if name not in where]:
            raise UserError(f"{path} has no tensor {missing[0]}, which config.json asks for")
        if tensor_map.constant is not None:
            _check_constant(tensor_map.names, tensor_map.constant, stored)
            continue
        for name, shape in zip(tensor_map.names, tensor_map.shapes(expected[ours])):
            _check_part(f"{where[name]}: {name}", stored.plan[name], shape)
        plan[ours] = tensor_map.ours([stored.plan[name] for name in tensor_map.names])
    used = {name for tensor_map in maps.values() for name in tensor_map.names}
    for name in sorted(where.keys() - used):
        if not _is_needless(name, stored, family):
            raise UserError(
                f"{where[name]}: {name} belongs to no part of a {family.architecture} as"
                " config.json describes it"
            )
    return Weights(plan, lambda name: maps[name].ours([stored[part] for part in maps[name].names]))


def _check_constant(names: tuple[str, ...], constant: float, stored: Weights) -> None:
    for name in names:
        if not (stored[name] == constant).all():
            raise UserError(
                f"{name} is not {constant:g} everywhere, although config.json says under `fastgpt`"
                " that the model has no such tensor"
            )


def _check_part(name: str, part: Tensor, shape: tuple[int, ...]) -> None:
    if not part.is_floating_point():
        raise UserError(f"{name} holds {part.dtype}: expected floats")
    if part.shape != shape:
        raise UserError(
            f"{name} has the shape {tuple(part.shape)}: expected {shape}, as config.json has it"
        )


def _is_needless(name: str, stored: Weights, family: Family) -> bool:
    """Returns True for a buffer, and for a tied head that is stored twice."""
    tied = name == "lm_head.weight" and torch.equal(stored[name], stored[family.embedding])
    return tied or name.endswith(family.buffers)


def _stored(path: Path, prefix: str) -> tuple[Weights, dict[str, Path]]:
    """Opens the tensors of a folder, in one file or several; also returns the file of each.

    Args:
        prefix: begins all names but the head's; GPT-2's files on the hub lack it.
    """
    found: dict[str, tuple[Weights, str]] = {}
    where: dict[str, Path] = {}
    for file in _files(path):
        with _reading(file):
            weights = tensors.read(file)
        for short in weights:
            name = short if short.startswith((prefix, "lm_head.")) else f"{prefix}{short}"
            if name in where:
                raise UserError(f"{name} is in two files: {where[name]} and {file}")
            found[name], where[name] = (weights, short), file

    def tensor(name: str) -> Tensor:
        weights, short = found[name]
        with _reading(where[name]):
            return weights[short]

    plan = {name: weights.plan[short] for name, (weights, short) in found.items()}
    return Weights(plan, tensor), where


def _files(path: Path) -> list[Path]:
    """Returns the safetensors files of a folder."""
    index = path / "model.safetensors.index.json"
    files = [path / "model.safetensors"]  # transformers, too, prefers it to an index
    if index.is_file() and not files[0].is_file():
        where = _json(index).get("weight_map")
        if not isinstance(where, dict) or not where:
            raise UserError(f"{index} has the weight_map {shown(where)}: expected names and files")
        outside = [x for x in where.values() if type(x) is not str or Path(x).name != x]
        if outside:
            raise UserError(f"{index} names {shown(outside[0])}: expected files of the same folder")
        files = sorted({path / name for name in where.values()})
    with _reading(path):  # a name may be too long
        missing = [file.name for file in files if not file.is_file()]
    if missing:
        few = ", ".join(missing[:3]) + ", ..." * (len(missing) > 3)
        raise UserError(f"{path}: {counted(len(missing), 'file')} missing: {few}")
    return files


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Turns an error met while reading `file` into a `UserError`."""
    try:
        yield
    except (OSError, UnicodeDecodeError, SafetensorError) as error:
        raise UserError(f"{file} cannot be read: {error}") from error
