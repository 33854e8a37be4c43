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
from fastgpt.convert.families import GPT2, config_from, links_of
from fastgpt.convert.family import Family, Links, Settings
from fastgpt.convert.llmc import read_llmc
from fastgpt.convert.nanogpt import read_nanogpt
from fastgpt.convert.vocabulary import from_folder
from fastgpt.data.tokenizers import Tokenizer, load_tokenizer
from fastgpt.errors import UserError, counted, reason, shown
from fastgpt.files import parse_json
from fastgpt.model.build import build_model
from fastgpt.model.gpt import GPT
from fastgpt.ops import tables

HUB_NAME = re.compile(r"gpt2(-medium|-large|-xl)?|distilgpt2|[\w.-]+/[\w.-]+")
"""Names that are looked up on the hub: those of an owner's model, and the old ones of GPT-2."""
FILES = ("*.safetensors", "*.json", "merges.txt", "*.jinja")
"""Files of a hub repository that are downloaded, but not those of its folders: no pickles."""

KEPT = (
    "generation_config.json", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.jinja",
)  # fmt: skip
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True, slots=True)
class Source:
    """A model that was read."""

    path: Path
    kind: str
    """`run` (a run or checkpoint of ours), `hf` (Hugging Face), `nanogpt` or `llmc`."""
    config: ModelConfig
    weights: Weights
    """By our names, in the dtype of the file, without padding of the vocabulary."""
    tokenizer: Tokenizer | None
    warnings: list[str] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)
    """Files of Hugging Face that fastgpt does not interpret, by name, with their text; of
    config.json only the fields `IDS`."""

    def complaints(self) -> list[str]:
        """Returns the warnings, and one if there is no tokenizer."""
        lacks = f"{self.path} has no tokenizer: the model works on token ids only"
        return [*self.warnings, *[lacks] * (self.tokenizer is None)]

    def build(self, device: str = "cpu", asked: OpsConfig | None = None) -> GPT:
        """Builds the model in evaluation mode, in fp32, with the ops asked for."""
        selected = tables.select(asked or OpsConfig(), device, compiled=False)
        model = build_model(self.config, selected)
        state = model.state_dict()
        with _reading(self.path):  # a training run may have removed the checkpoint
            for name, x in self.weights.items():  # one at a time: they are not in memory twice
                state[name].copy_(x)
        return model.to(device).eval()


def read(source: str) -> Source:
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
        return _checked(Source(path, kind, config, tensors.in_memory(weights), None))
    if path.exists():
        raise UserError(
            f"{source} is no model: expected a run or checkpoint, a folder with config.json and"
            " safetensors files, or a file of nanoGPT (.pt) or llm.c (.bin)"
        )
    return _of_folder(_downloaded(source))


READERS = {".pt": ("nanogpt", read_nanogpt), ".bin": ("llmc", read_llmc)}


def _checked(source: Source) -> Source:
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


def _of_run(path: Path) -> Source:
    found, complaints = checkpoint.find(str(path), state=False)
    saved, others = found.path / "tokenizer.json", found.path / "huggingface.json"
    return _checked(
        Source(
            path=found.path,
            kind="run",
            config=saved_config(found.path).model,
            weights=found.weights,
            tokenizer=load_tokenizer(saved) if saved.exists() else None,
            warnings=complaints,
            kept=_kept(others) if others.exists() else {},
        )
    )


def _kept(path: Path) -> dict[str, str]:
    """Reads the files that a conversion kept: their names and texts."""
    kept = _json(path)
    if not all(isinstance(text, str) for text in kept.values()):
        raise UserError(f"{path} is damaged: expected names of files and their texts")
    return kept


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


def _of_folder(path: Path) -> Source:
    settings = _json(path / "config.json")
    config, family, unknown = config_from(settings)
    warnings = [f"config.json: unknown and ignored: {', '.join(unknown)}"] if unknown else []
    tokenizer = from_folder(path, gpt2=family is GPT2)
    assert config.vocab_size is not None
    if tokenizer is not None and config.vocab_size < tokenizer.vocab_size:
        raise UserError(
            f"{path}: the tokenizer has {tokenizer.vocab_size:,} tokens, and config.json has"
            f" vocab_size {config.vocab_size:,}: expected at least as many"
        )
    weights = Reader(path, family, links_of(family, config)).weights(shapes(config))
    kept = {"config.json": json.dumps({name: settings[name] for name in IDS if name in settings})}
    for name in KEPT:
        if (path / name).is_file():
            with _reading(path / name):
                kept[name] = (path / name).read_text(encoding="utf-8")
    return Source(path, "hf", config, weights, tokenizer, warnings, kept)


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
            model = build_model(config, tables.select(OpsConfig(), "cpu", compiled=False))
    except RuntimeError as error:
        raise UserError(f"the model's sizes are too large: {reason(error)}") from error
    return {name: x.shape for name, x in model.state_dict().items()}


class Reader:
    """The tensors of a folder of Hugging Face, in one file or several."""

    def __init__(self, path: Path, family: Family, links: Links) -> None:
        self.path, self.family, self.links = path, family, links
        self.files = _files(path)
        self.where: dict[str, Path] = {}
        """Name of a tensor -> its file."""
        for file, name in ((file, name) for file, found in self.files.items() for name in found):
            if name in self.where:
                raise UserError(f"{name} is in two files: {self.where[name]} and {file}")
            self.where[name] = file

    def weights(self, shapes: dict[str, torch.Size]) -> Weights:
        """Returns the tensors under our names.

        Raises:
            UserError: one is missing, has another shape, or belongs to no part of our model.
        """
        taken, plan = set(), {}
        for ours, link in self.links.items():
            parts = [self.planned(name) for name in link.names]
            taken.update(map(self.stored, link.names))
            if link.filler is not None:
                self.check_filler(link.names, link.filler)
                continue
            for name, part, shape in zip(link.names, parts, link.shapes(shapes[ours])):
                if not part.is_floating_point():
                    file = self.where[self.stored(name)]
                    raise UserError(f"{file}: {name} holds {part.dtype}: expected floats")
                if part.shape != shape:
                    raise UserError(
                        f"{self.where[self.stored(name)]}: {name} has the shape"
                        f" {tuple(part.shape)}: expected {shape}, as config.json has it"
                    )
            plan[ours] = link.ours(parts)
        found = Weights(plan, self.ours)
        self.check_rest(self.where.keys() - taken, found)
        return found

    def ours(self, name: str) -> Tensor:
        """Reads a tensor by our name."""
        link = self.links[name]
        return link.ours([self.tensor(part) for part in link.names])

    def stored(self, name: str) -> str:
        """Returns the name in the file: GPT-2's on the hub lack the prefix."""
        short = name.removeprefix("transformer.")
        return short if name not in self.where and short in self.where else name

    def planned(self, name: str) -> Tensor:
        """Returns a tensor without its values, on the device `meta`."""
        name = self.stored(name)
        if name not in self.where:
            raise UserError(f"{self.path} has no tensor {name}, which config.json asks for")
        return self.files[self.where[name]].plan[name]

    def tensor(self, name: str) -> Tensor:
        file = self.where[self.stored(name)]
        with _reading(file):
            return self.files[file][self.stored(name)]

    def check_filler(self, names: tuple[str, ...], filler: float) -> None:
        for name in names:
            if not (self.tensor(name) == filler).all():
                raise UserError(
                    f"{name} is not {filler:g} everywhere, although config.json says under"
                    " `fastgpt` that the model has no such tensor"
                )

    def check_rest(self, rest: set[str], found: Weights) -> None:
        """Raises `UserError` if tensors that the model would need are left over."""
        for name in sorted(rest):
            if name.endswith(self.family.buffers):
                continue
            if name == "lm_head.weight" and torch.equal(self.tensor(name), found["wte.weight"]):
                continue  # tied, and stored twice
            raise UserError(
                f"{self.where[name]}: {name} belongs to no part of a {self.family.architecture}"
                " as config.json describes it"
            )


def _files(path: Path) -> dict[Path, Weights]:
    """Returns the tensors of each file."""
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
    found = {}
    for file in files:
        with _reading(file):
            found[file] = tensors.read(file)
    return found


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Turns an error met while reading `file` into a `UserError`."""
    try:
        yield
    except (OSError, UnicodeDecodeError, SafetensorError) as error:
        raise UserError(f"{file} cannot be read: {error}") from error
