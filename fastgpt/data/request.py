"""Requests to prepare a corpus, and the progress of a request."""

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from fastgpt.data.batches import Encoded
from fastgpt.data.corpus import FORMAT_VERSION, SPLITS
from fastgpt.data.reading import UTF_8, Source
from fastgpt.data.shards import MAX_TOKENS
from fastgpt.data.tokenizers import KINDS
from fastgpt.data.tokenizers.base import tokenizer_file
from fastgpt.data.verify import file_stamp
from fastgpt.errors import UserError

PROGRESS = "progress.json"
TAIL_FRACTION, DOCUMENT_FRACTION = 0.1, 0.005
"""Default fractions held out of a text, and of a set of documents."""


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


@dataclass(kw_only=True)
class Progress:
    """Progress of a request: the batches that were written, and the counts of them."""

    batches: int = 0
    digest: str = ""
    """A chain of sha256 over the batches."""
    tokens: dict[str, int] = field(default_factory=_no_tokens)
    num_bytes: dict[str, int] = field(default_factory=_no_tokens)
    """Bytes of UTF-8 that the tokens stand for."""
    documents: dict[str, int] = field(default_factory=_no_tokens)

    def add(self, result: Encoded) -> None:
        """Counts a batch."""
        self.batches += 1
        self.digest = hashlib.sha256(self.digest.encode() + result.digest).hexdigest()
        for split in SPLITS:
            self.tokens[split] += result.tokens[split].size
            self.num_bytes[split] += result.num_bytes[split]
            self.documents[split] += result.documents[split]


def load_progress(out: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads the facts of an earlier request and its progress, both empty if there are none."""
    try:
        saved = json.loads((out / PROGRESS).read_text())
        return saved["request"], saved["progress"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}, {}


def check_same(out: Path, before: dict[str, Any], facts: dict[str, Any]) -> None:
    """Raises `UserError` unless the facts of an earlier request are those of this one."""
    old, new = ({**x, **x.get("source", {}), "source": None} for x in (before, facts))
    other = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    if other:
        raise UserError(
            f"{out} holds another preparation (different: {', '.join(other)}): pass the old"
            " settings to resume it, or remove it to start again"
        )
