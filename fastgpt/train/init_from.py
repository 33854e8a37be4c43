"""Runs that start from a model that exists: `--init-from`."""

import hashlib
import re
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

from fastgpt.checkpoint import checkpoint
from fastgpt.config.checks import flag
from fastgpt.config.config import Config, DataConfig
from fastgpt.config.model import ModelConfig
from fastgpt.convert.source import OpenedModel, read_header, read_hf_files
from fastgpt.data.tokenizers import TOKENIZER_FILE, Tokenizer, load_tokenizer, same_tokenizer
from fastgpt.errors import UserError, reason, writing
from fastgpt.files import cache_dir, write_atomically
from fastgpt.model.gpt import GPT
from fastgpt.parallel import fsdp
from fastgpt.run import directory
from fastgpt.sampling.chat import Template, template_of

Warn = Callable[[str], None]
"""Function that is called with each warning, one line long."""
OWN = ("dropout", "dropout_places", "vocab_multiple")
"""Settings of the model that come from the recipe and flags."""
FREE = (*OWN, "context", "document_mask", "eot_id", "init")
"""Settings that flags may change, since they decide no weight, or which of them are used."""


def with_architecture(default: Config, init_from: str) -> Config:
    """Returns a recipe's settings with the architecture of the model that `init_from` names.

    The batch has as many whole sequences of that model's context as the recipe's tokens make.
    """
    found = read_header(init_from)
    model = replace(found, **{name: getattr(default.model, name) for name in OWN})
    sequences = max(1, default.train.batch_tokens // model.context)
    train = replace(default.train, batch_tokens=sequences * model.context)
    return replace(default, init_from=init_from, model=model, train=train)


def check_architecture(config: Config, source: ModelConfig) -> None:
    """Raises `UserError` if a flag contradicts the architecture that `with_architecture` found."""
    for name in (field.name for field in fields(source)):
        given, expected = getattr(config.model, name), getattr(source, name)
        if name not in FREE and given != expected:
            asked = f"{flag(f'model.{name}')} is {given}"
            raise UserError(f"{asked}: expected {expected}, as in --init-from {config.init_from}")
    if source.position == "learned" and config.model.context > source.context:
        asked, most = f"--model.context is {config.model.context}", source.context
        raise UserError(f"{asked}: expected at most {most}, as {config.init_from} has positions")


def with_tokenizer(config: Config, source: OpenedModel | None) -> DataConfig:
    """Returns the settings of the data, with the model's tokenizer in place of `auto`.

    The model is `source`, or if that is None the checkpoint to resume. Its tokenizer is copied
    into the cache, so that a text is tokenized once, and not again for each checkpoint.
    """
    if config.init_from is None or config.data.tokenizer != "auto":
        return config.data
    kept = source and source.tokenizer
    if source is not None and kept is None:
        raise UserError(
            f"{source.path} has no tokenizer: pass the one that it was trained with,"
            " --data.tokenizer gpt2, bytes, chars or the path of a tokenizer.json"
        )
    tokenizer = kept or load_tokenizer(_side_file(config, TOKENIZER_FILE))
    content = tokenizer.to_json().encode()
    digest = hashlib.sha256(content).hexdigest()[:16]
    path = cache_dir() / "tokenizers" / f"{Path(config.init_from).resolve().name}-{digest}.json"
    if not path.is_file():
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, content)
    return replace(config.data, tokenizer=str(path))


def _side_file(config: Config, name: str) -> Path:
    """Returns a file of the checkpoint to resume, or of a run's newest checkpoint that has it."""
    resume = Path(config.resume or "")
    checkpoints = [resume, *reversed(checkpoint.steps_on_disk(resume / "checkpoints"))]
    paths = [path / name for path in checkpoints]
    return next((path for path in paths if path.is_file()), paths[0])


def chat_template(config: Config, source: OpenedModel | None) -> Template:
    """Returns the chat template of the checkpoint to resume, the flag, the model, or ChatML."""
    kept = {} if source is None else source.hf_files
    if directory.resumes(config.resume):
        kept = read_hf_files(_side_file(config, "huggingface.json"))
    elif config.data.chat_template is not None:
        path = Path(config.data.chat_template).expanduser()
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"--data.chat-template {path} cannot be read: {reason(error)}"
            ) from error
        if not re.search(r"[be]os_token", text):
            kept = {}  # what begins and ends a turn is not the model's
        kept = kept | {"chat_template.jinja": text}
    return template_of(kept) or Template()


def kept_files(
    source: OpenedModel | None, resumed: Path | None, template: str | None
) -> dict[str, str]:
    """Returns the files of Hugging Face that a run keeps: its template, and its model's end ids.

    Args:
        source: model that a new run starts from.
        resumed: checkpoint of a run that goes on.
    """
    path = resumed and resumed / "huggingface.json"
    kept = source.hf_files if source else read_hf_files(path) if path else {}
    ids = {name: kept[name] for name in ("config.json", "generation_config.json") if name in kept}
    return ids if template is None else ids | {"chat_template.jinja": template}


def check_vocabulary(source: OpenedModel, tokenizer: Tokenizer) -> None:
    """Raises `UserError` if the data's tokenizer is known not to be the model's."""
    assert source.config.vocab_size is not None
    own, most = source.tokenizer, source.config.vocab_size
    if tokenizer.vocab_size > most or not (own is None or same_tokenizer(own, tokenizer)):
        expected = f"at most {most:,}" if own is None else f"its own, {own.kind} ({own.vocab_size})"
        raise UserError(
            f"the data has the {tokenizer.kind} tokenizer ({tokenizer.vocab_size} tokens):"
            f" {source.path} needs {expected}; with equal numbers, some tokens differ"
        )


def load_weights(source: OpenedModel, model: GPT) -> None:
    """Loads weights into a model, whose context may be shorter than the source's."""
    weights = dict(source.weights)
    if "wpe.weight" in weights:
        weights["wpe.weight"] = weights["wpe.weight"][: model.config.context]
    fsdp.load_weights(model, weights)
