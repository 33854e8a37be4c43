"""Corpora for training: training and validation tokens on disk, with their tokenizer.

A prepared directory holds shards `train_000000.bin` ..., `val_000000.bin` ..., `tokenizer.json` and
`manifest.json`. Folders of shards that llm.c or modded-nanogpt wrote are read as well.
"""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fastgpt.data.shards import LARGE, Tokens
from fastgpt.data.tokenizers import (
    TOKENIZER_FILE,
    Tokenizer,
    load_tokenizer,
    make_tokenizer,
    same_tokenizer,
)
from fastgpt.data.verify import check_once, document_starts
from fastgpt.errors import UserError, brief, shown
from fastgpt.files import parse_json, sha256_of
from fastgpt.terminal import REPLACEMENT

SPLITS: tuple[str, ...] = ("train", "val")
MANIFEST = "manifest.json"
FORMAT_VERSION = 2
"""Version of a prepared directory; part of every request, so that older ones are prepared again."""
SAMPLED_BYTES = 4096
"""Bytes at the beginning and end of a shard that tell another program's datasets apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Training and validation tokens with their tokenizer."""

    name: str
    """Short name, fit for a file name."""
    train: Tokens
    val: Tokens
    tokenizer: Tokenizer
    val_bytes_per_token: float | None
    """Mean bytes of UTF-8 per token of `val`, for bits per byte; None if unknown."""
    sha256: str
    """Sha256 that identifies the text; for another program's shards a fingerprint of the files."""
    python: str | None
    """Python version whose library is the built-in corpus; None for other corpora."""
    path: Path
    manifest: dict[str, Any]
    """Manifest as it was written; empty for the shards of another program."""

    @property
    def fingerprint(self) -> str:
        """Sha256 of all tokens; the same text may be tokenized or split in another way."""
        parts = self.sha256, [*self.shards().values()]
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def document_starts(self, split: str) -> np.ndarray:
        """Returns the offsets where documents of a split begin: (documents,) int64, increasing.

        Raises:
            UserError: the tokenizer has no token to tell documents apart.
        """
        if self.tokenizer.eot_id is None:
            raise UserError(
                f"{self.name}: the {self.tokenizer.kind} tokenizer has no end-of-text token to tell"
                " documents apart: use another tokenizer, for example gpt2"
            )
        return document_starts(getattr(self, split), self.tokenizer.eot_id)

    def first_words(self) -> str:
        """Returns up to three whole words of the held-out text, or a newline if it has none."""
        ids = np.array([i for i in self.val[:64].tolist() if i != self.tokenizer.eot_id])
        text = self.tokenizer.decode(ids).replace(REPLACEMENT, "")
        # the held-out text may begin within a word
        words = re.search(r"\s(\S+(?:\s+\S+){0,2})\s", text)
        return words[1] if words else text.strip()[:16] or "\n"

    def shards(self) -> dict[Path, str | None]:
        """Returns each shard's sha256 that was recorded; None for another program's."""
        if not self.manifest:
            return dict.fromkeys((*self.train.paths, *self.val.paths))
        entries = [e for split in self.manifest["splits"].values() for e in split["shards"]]
        return {self.path / entry["file"]: entry["sha256"] for entry in entries}


def has_shards(path: Path) -> bool:
    """Returns True for a prepared directory, or a folder of another program's shards."""
    return (path / MANIFEST).is_file() or (path.is_dir() and any(path.glob("*train*.bin")))


def open_shards(path: Path, *, tokenizer: str) -> Corpus:
    """Opens a prepared directory, or a folder of shards that another program wrote.

    Args:
        tokenizer: a kind, the path of a `tokenizer.json`, or `auto`: the one saved with the shards,
            else GPT-2's.
    Raises:
        UserError: the data was made with another tokenizer, or a shard is damaged or holds an id
            that the tokenizer does not have.
    """
    if not (path / MANIFEST).is_file():
        corpus = _read_foreign(path, tokenizer)
    else:
        corpus, asked = read_prepared(path), Path(tokenizer).expanduser()
        kind = corpus.tokenizer.kind
        if tokenizer not in ("auto", kind) and not (
            asked.exists() and same_tokenizer(corpus.tokenizer, load_tokenizer(asked))
        ):
            raise UserError(f"{path} was prepared with tokenizer {kind!r}, not {tokenizer!r}")
    check_once(corpus.shards(), corpus.tokenizer.vocab_size)
    return corpus


def read_manifest(path: Path) -> dict[str, Any]:
    """Reads the manifest of a prepared directory.

    Raises:
        UserError: it is missing, is not JSON, or is of another format version.
    """
    try:
        manifest = parse_json((path / MANIFEST).read_text(encoding="utf-8"))
        version = manifest["format_version"]
    except OSError as error:
        raise UserError(f"{path} is not a prepared directory: no {MANIFEST} in it") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path / MANIFEST} is damaged ({brief(error)})") from error
    if version != FORMAT_VERSION:
        raise UserError(
            f"{path / MANIFEST}: format {shown(version)}, expected {FORMAT_VERSION}: prepare it"
            " again"
        )
    return manifest


def read_prepared(path: Path) -> Corpus:
    """Opens a prepared directory without reading its tokens; raises `UserError` if damaged."""
    manifest, file = read_manifest(path), path / TOKENIZER_FILE
    try:
        _check_types(manifest)
        val = manifest["splits"]["val"]
        found = {split: _read_split(path, manifest["splits"][split]) for split in SPLITS}
        tokenizer = load_tokenizer(file)
        if sha256_of(file) != manifest["tokenizer_sha256"]:
            raise UserError(f"{file} was changed: its sha256 is not the manifest's")
        return Corpus(
            name=manifest["name"], **found, tokenizer=tokenizer,
            val_bytes_per_token=(val["bytes"] / val["tokens"]) or None,
            sha256=manifest["sha256"], python=manifest["python"], path=path, manifest=manifest,
        )  # fmt: skip
    except (OSError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise UserError(f"{path / MANIFEST} is damaged ({brief(error)})") from error


def _check_types(manifest: dict[str, Any]) -> None:
    """Raises `TypeError` or `ValueError` if values in a manifest are of a wrong kind."""
    splits = [manifest["splits"][name] for name in SPLITS]
    shards = [shard for split in splits for shard in split["shards"]]
    counts = [x["tokens"] for x in (*splits, *shards)] + [split["bytes"] for split in splits]
    texts = [manifest[name] for name in ("name", "sha256", "tokenizer_sha256")]
    texts += [shard[name] for shard in shards for name in ("file", "sha256")]
    if any(type(x) is not int for x in counts) or any(type(x) is not str for x in texts):
        raise TypeError("a value has the wrong type")
    if any(Path(shard["file"]).name != shard["file"] for shard in shards):
        raise ValueError("a shard is no file in this folder")


def _read_split(path: Path, split: dict[str, Any]) -> Tokens:
    tokens = Tokens([path / shard["file"] for shard in split["shards"]])
    recorded = [shard["tokens"] for shard in split["shards"]]
    if tokens.counts.tolist() != recorded or len(tokens) != split["tokens"]:
        raise ValueError("the shards beside it have other numbers of tokens")
    return tokens


def _read_foreign(path: Path, tokenizer: str) -> Corpus:
    """Opens a folder of shards without a manifest, named as llm.c and modded-nanogpt do."""
    found = {split: sorted(path.glob(f"*{split}*.bin")) for split in SPLITS}
    if missing := [f"*{split}*.bin" for split, paths in found.items() if not paths]:
        raise UserError(
            f"{path} has no {' or '.join(missing)}: expected a {MANIFEST}, or shards of both splits"
        )
    train, val = (Tokens(paths) for paths in found.values())
    if tokenizer == "auto" and (path / TOKENIZER_FILE).is_file():
        tokenizer = str(path / TOKENIZER_FILE)
    if tokenizer == "auto" and train.dtype == LARGE:
        raise UserError(
            f"{path} holds 32-bit token ids and no {TOKENIZER_FILE}: pass the tokenizer that made"
            " them with --data.tokenizer PATH"
        )
    digest = hashlib.sha256()  # of names and sizes, and a little of the content
    for shard in (*train.paths, *val.paths):
        with shard.open("rb") as file:
            size, start = shard.stat().st_size, file.read(SAMPLED_BYTES)
            file.seek(max(0, size - SAMPLED_BYTES))
            digest.update(repr((shard.name, size, start, file.read())).encode())
    return Corpus(
        name=path.resolve().name.lower(), train=train, val=val,
        tokenizer=make_tokenizer("gpt2" if tokenizer == "auto" else tokenizer, None),
        val_bytes_per_token=None, sha256=digest.hexdigest(), python=None, path=path, manifest={},
    )  # fmt: skip
