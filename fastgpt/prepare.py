"""`python -m fastgpt.prepare SOURCE --out DIR`: tokenizes a corpus once, for many runs.

Then `--data.source DIR` trains on it. Broken off, the same command goes on where it stopped.
"""

import codecs
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from fastgpt.data.corpus import read_manifest
from fastgpt.data.prepare import prepare
from fastgpt.data.prepare.request import SHARD_TOKENS
from fastgpt.display import PrepareProgress, command
from fastgpt.errors import UserError, shown_in_one_line


@dataclass(frozen=True, kw_only=True, slots=True)
class Arguments:
    """Tokenizes a corpus and writes it as token shards in llm.c's format."""

    source: Annotated[str, tyro.conf.Positional]
    """A name (builtin, shakespeare, tinystories, openwebtext, fineweb, fineweb-edu), a data set of
    the Hugging Face hub (hf:owner/name[/configuration][@revision]), or files: one, a folder, or a
    quoted pattern ('data/*.jsonl.gz'). Text, JSON lines and Parquet; .gz and .zst are unpacked."""
    out: Path
    """Directory to write; it must be empty or not exist."""
    tokenizer: str = "auto"
    """bytes, chars, gpt2; bpe or wordpiece, trained on the source; or the path of a tokenizer.json.
    auto: chars for shakespeare, bytes for other text, gpt2 for sets of documents."""
    vocab_size: int | None = None
    """Tokens of a bpe or wordpiece vocabulary, which is learnt from the first 100 million
    characters."""
    val_fraction: float | None = None
    """What is held out, between 0 and 1: the end of a text (0.1 by default), or so many of a set's
    documents, chosen by their hash (0.005). Files, folders and splits named train and
    val(idation) are kept apart as they are."""
    separator: str | None = None
    r"""What stands between the documents of a text: '\n' for one a line, '<|endoftext|>', ...
    Without it a text is one document."""
    field: str = "text"
    """The field or column that holds the text: JSON lines, Parquet, the hub."""
    encoding: str = "utf-8"
    """Encoding of text files, as Python names it: utf-8, utf-16, cp1252, ..."""
    shard_tokens: int = SHARD_TOKENS
    """Tokens in each shard but the last."""
    workers: int | None = None
    """Threads that tokenize; by default one a core. The files do not depend on it."""


def main(argv: list[str] | None = None) -> None:
    """Runs the command line `argv`, by default the process's own."""
    arguments = tyro.cli(Arguments, args=argv, prog=command("python -m fastgpt.prepare"))
    with shown_in_one_line():
        with PrepareProgress() as shown:
            options: dict[str, Any] = asdict(arguments)
            options["separator"] = _unescaped(arguments.separator)
            out = prepare(**options, report=shown)
        print(_summary(out, shown.seconds))


def _unescaped(separator: str | None) -> str | None:
    r"""A shell hands `\n` over as two characters."""
    if separator is None:
        return None
    try:
        return codecs.decode(separator.encode("latin-1", "backslashreplace"), "unicode_escape")
    except UnicodeDecodeError as error:
        raise UserError(
            rf"--separator {separator!r}: expected text, with \n for a newline"
        ) from error


def _summary(path: Path, seconds: float) -> str:
    manifest = read_manifest(path)
    splits = manifest["splits"]
    counts = {split: f"{entry['tokens']:,}" for split, entry in splits.items()}
    documents = sum(entry["documents"] for entry in splits.values())
    files = sum(len(entry["shards"]) for entry in splits.values())
    python = f", Python {manifest['python']}" if manifest["python"] else ""
    return (
        f"{manifest['name']}{python}: {counts['train']} tokens to train on,"
        f" {counts['val']} to validate on"
        f" ({manifest['tokenizer']}, vocabulary {manifest['vocab_size']:,})\n"
        f"documents: {documents:,}; shards: {files}; seconds: {seconds:.1f}\n"
        f"sha256 {manifest['sha256']}\n"
        f"wrote {path}"
    )


if __name__ == "__main__":
    main()
