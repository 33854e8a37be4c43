"""Requests to prepare a corpus, and the progress of a request."""

import hashlib
import json
import logging
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fastgpt.data.corpus import FORMAT_VERSION, SPLITS
from fastgpt.data.prepare.batches import Encoded, Place
from fastgpt.data.prepare.sources import Source
from fastgpt.data.prepare.text import UTF_8
from fastgpt.data.shards import MAX_TOKENS
from fastgpt.data.tokenizers import KINDS, SIZED
from fastgpt.data.tokenizers.base import tokenizer_file
from fastgpt.data.verify import file_stamp
from fastgpt.errors import UserError, counted

PROGRESS = "progress.json"
SHARD_TOKENS = 100_000_000
"""Number of tokens in a shard, as in llm.c's and modded-nanogpt's."""


LEARNT = ("chars", *SIZED)
"""Tokenizers that are trained on the source before it is tokenized."""

OPTIONS = (
    "tokenizer", "vocab_size", "val_fraction", "separator", "field", "encoding", "shard_tokens",
)  # fmt: skip
"""Settings that have a flag of the same name."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Source and settings of a preparation; equal requests give the same bytes."""

    source: Source
    tokenizer: str
    """A kind, or the path of a `tokenizer.json`."""
    vocab_size: int | None = None
    """Vocabulary size of a tokenizer that is trained; None: its default."""
    val_fraction: float
    """Fraction held out of the text or documents; files named train and val keep their split."""
    shard_tokens: int = SHARD_TOKENS

    def __post_init__(self) -> None:
        check_settings(self.val_fraction, self.shard_tokens)

    def facts(self) -> dict[str, Any]:
        """Returns everything that decides the result, as JSON: files by path, size and time."""
        values = asdict(self)
        files = values["source"].pop("files")
        values["source"]["skipped"] = len(self.source.skipped)
        if self.source.encoding == UTF_8:  # older preparations, without this setting, stay valid
            del values["source"]["encoding"]
        values["files"] = [
            [*file.values(), *([] if file["format"] == "hub" else file_stamp(file["path"]))]
            for file in files
        ]
        if self.tokenizer not in KINDS:
            path = tokenizer_file(Path(self.tokenizer).expanduser())
            values["tokenizer"] = [self.tokenizer, *file_stamp(path)]
        return json.loads(json.dumps({"format_version": FORMAT_VERSION, **values}))


def check_settings(val_fraction: float, shard_tokens: int, workers: int | None = None) -> None:
    """Raises `UserError` for a value that is impossible with every source."""
    if not 0 < val_fraction < 1:
        raise UserError(f"--val-fraction is {val_fraction}: expected a fraction in (0, 1)")
    if not 1 <= shard_tokens <= MAX_TOKENS:
        raise UserError(f"--shard-tokens is {shard_tokens}: expected 1 to {MAX_TOKENS:,}")
    if workers is not None and workers < 1:
        raise UserError(f"--workers is {workers}: expected 1 or more")


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
    progress = saved["progress"]
    found = Progress(**{**progress, "place": Place(**progress["place"])})
    facts, before = request.facts(), saved["request"]
    old, new = before.get("files", []), facts["files"]
    changed = _changed(before, facts)
    if [f[:3] for f in old] != [f[:3] for f in new]:
        changed.append(f"it had {counted(len(old), 'file')}, now different ones")
    # files that are yet to be read may be corrected without losing the work so far, unless the
    # whole source is read before any token is made
    reads_once = request.source.split != "tail" and request.tokenizer not in LEARNT
    behind = found.place.file if reads_once else len(new)
    changed += [f"{a[0]} was changed" for a, b in zip(old[:behind], new[:behind]) if a != b]
    if changed and found.place == Place():
        return None
    if changed:
        raise UserError(
            f"{out} holds another preparation ({', '.join(changed)}): pass the old settings to"
            " resume it, or remove it to start again"
        )
    if old[behind : behind + 1] != new[behind : behind + 1] and found.place.row:
        logger.warning("%s was changed: reading on from row %d", old[behind][0], found.place.row)
    return found


def _changed(before: dict[str, Any], facts: dict[str, Any]) -> list[str]:
    """Lists the settings that differ, as they are given on the command line."""
    old, new = ({"encoding": UTF_8} | values | values["source"] for values in (before, facts))
    names = {"given": "source"} | {name: f"--{name}".replace("_", "-") for name in OPTIONS}
    return [
        f"{names.get(name, name)} was {_short(old.get(name))}, now {_short(new[name])}"
        for name in new
        if name not in ("source", "name", "files") and old.get(name) != new[name]
    ]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
