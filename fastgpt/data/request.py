"""Requests to prepare a corpus, and the progress of a request."""

import hashlib
import json
import logging
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from fastgpt.data.batches import Encoded
from fastgpt.data.corpus import FORMAT_VERSION, SPLITS
from fastgpt.data.reading import UTF_8, Place, Source
from fastgpt.data.shards import MAX_TOKENS
from fastgpt.data.tokenizers import KINDS, SIZED
from fastgpt.data.tokenizers.base import tokenizer_file
from fastgpt.data.verify import file_stamp
from fastgpt.errors import UserError

PROGRESS = "progress.json"
TAIL_FRACTION, DOCUMENT_FRACTION = 0.1, 0.005
"""Default fractions held out of a text, and of a set of documents."""
LEARNT = ("chars", *SIZED)
"""Tokenizers that are trained on the source before it is tokenized."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of a preparation: flags of `python -m fastgpt.prepare`, which shows their texts."""

    tokenizer: str = "auto"
    """Tokenizer: auto, bytes, chars, gpt2, bpe or wordpiece. It may also be the path of a
    tokenizer.json; bpe and wordpiece are trained on the source. `auto` uses chars for shakespeare,
    bytes for other text and gpt2 for sets of documents."""
    vocab_size: int | None = None
    """Vocabulary size of a bpe or wordpiece tokenizer. By default it is 32,768. The tokenizer
    learns from the first 100 million characters."""
    val_fraction: float | None = None
    """Fraction held out for validation; by default 0.1 of a text or 0.005 of a set of documents. It
    is between 0 and 1: of a text the end, of documents those chosen by their hash. Files, folders
    and splits named train and validation keep their split."""
    separator: str | None = None
    r"""Text between the documents of a text file, such as '\n'. Without it a file is one
    document."""
    field: str = "text"
    """JSON field or Parquet column with the text."""
    encoding: str = UTF_8
    """Encoding of text files, for example cp1252. Every text encoding of Python is accepted."""
    shard_tokens: int = 100_000_000
    """Number of tokens in each shard but the last."""

    def __post_init__(self) -> None:
        if self.val_fraction is not None and not 0 < self.val_fraction < 1:
            raise UserError(f"--val-fraction is {self.val_fraction}: expected a fraction in (0, 1)")
        if not 1 <= self.shard_tokens <= MAX_TOKENS:
            raise UserError(f"--shard-tokens is {self.shard_tokens}: expected 1 to {MAX_TOKENS:,}")


@dataclass(frozen=True, slots=True)
class Request:
    """Source and settings of a preparation; equal requests give the same bytes."""

    source: Source
    settings: Settings

    @classmethod
    def of(cls, source: Source, settings: Settings) -> "Request":
        """Makes a request, in which the defaults that depend on the source are resolved."""
        tokenizer, fraction = settings.tokenizer, settings.val_fraction
        if tokenizer == "auto":
            plain = "chars" if source.name == "shakespeare" else "bytes"
            tokenizer = plain if source.plain else "gpt2"
        if fraction is None:
            fraction = TAIL_FRACTION if source.plain else DOCUMENT_FRACTION
        return cls(source, replace(settings, tokenizer=tokenizer, val_fraction=fraction))

    def facts(self) -> dict[str, Any]:
        """Returns everything that decides the result, as JSON: files by path, size and time."""
        source, settings = asdict(self.source), asdict(self.settings)
        settings = {name: value for name, value in settings.items() if name not in source}
        files = source.pop("files")
        source["skipped"] = len(self.source.skipped)
        if self.source.encoding == UTF_8:  # older preparations, without this setting, stay valid
            del source["encoding"]
        files = [
            [*file.values(), *([] if file["format"] == "hub" else file_stamp(file["path"]))]
            for file in files
        ]
        if self.settings.tokenizer not in KINDS:
            path = tokenizer_file(Path(self.settings.tokenizer).expanduser())
            settings["tokenizer"] = [self.settings.tokenizer, *file_stamp(path)]
        facts = {"format_version": FORMAT_VERSION, "source": source, **settings, "files": files}
        return json.loads(json.dumps(facts))


def _no_tokens() -> dict[str, int]:
    return dict.fromkeys(SPLITS, 0)


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Progress of a request: its place in the source, and the counts so far."""

    place: Place = field(default_factory=Place)
    digest: str = ""
    """A chain of sha256 over the batches."""
    tokens: dict[str, int] = field(default_factory=_no_tokens)
    num_bytes: dict[str, int] = field(default_factory=_no_tokens)
    """Bytes of UTF-8 that the tokens stand for."""
    documents: dict[str, int] = field(default_factory=_no_tokens)

    def after(self, result: Encoded, place: Place) -> "Progress":
        """Returns the progress after a batch, as a new object in case of an interrupt."""
        return Progress(
            place=place,
            digest=hashlib.sha256(self.digest.encode() + result.digest).hexdigest(),
            tokens={split: self.tokens[split] + result.tokens[split].size for split in SPLITS},
            num_bytes={split: self.num_bytes[split] + result.num_bytes[split] for split in SPLITS},
            documents={split: self.documents[split] + result.documents[split] for split in SPLITS},
        )


def load_progress(out: Path, request: Request) -> Progress | None:
    """Reads the progress of an earlier call; None if it left nothing worth keeping.

    Raises:
        UserError: the progress is of another request.
    """
    try:
        saved = json.loads((out / PROGRESS).read_text())
    except (OSError, ValueError):
        return None
    progress, before, facts = saved["progress"], saved["request"], request.facts()
    found = Progress(**{**progress, "place": Place(**progress["place"])})
    # Files that are yet to be read may be corrected without losing the work so far, unless the
    # whole source is read before any token is made.
    reads_once = request.source.split != "tail" and request.settings.tokenizer not in LEARNT
    changed = _changed(before, facts, found.place.file if reads_once else None)
    if changed and found.place == Place():
        return None
    if changed:
        raise UserError(
            f"{out} holds another preparation ({', '.join(changed)}): pass the old settings to"
            " resume it, or remove it to start again"
        )
    current = slice(found.place.file, found.place.file + (found.place.row > 0))
    if before["files"][current] != facts["files"][current]:
        path, row = request.source.files[found.place.file].path, found.place.row
        logger.warning("%s was changed: reading on from row %d", path, row)
    return found


def _changed(before: dict[str, Any], facts: dict[str, Any], num_files: int | None) -> list[str]:
    """Lists what differs, as it is given on the command line; of the files, the first ones."""
    old, new = ({"encoding": UTF_8} | values | values["source"] for values in (before, facts))
    labels = {flag.name: f"--{flag.name}".replace("_", "-") for flag in fields(Settings)}
    labels["given"] = "source"
    changed = [
        f"{labels.get(name, name)} was {old.get(name)!r}, now {new[name]!r}"
        for name in new
        if name not in ("source", "name", "files") and old.get(name) != new[name]
    ]
    if [file[:3] for file in old["files"]] != [file[:3] for file in new["files"]]:
        return [*changed, "it had other files"]
    pairs = [*zip(old["files"], new["files"])][:num_files]
    return changed + [f"{file[0]} was changed" for file, now in pairs if file != now]
