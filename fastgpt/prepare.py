"""`python -m fastgpt.prepare SOURCE --out DIR`: tokenizes a corpus once, for many runs.

`--data.source DIR` then trains on it.
"""

import codecs
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from fastgpt import flags
from fastgpt.commands import command
from fastgpt.data.corpus import read_manifest
from fastgpt.data.preparation import prepare
from fastgpt.data.writing import PrepareOptions
from fastgpt.errors import UserError, shown_in_one_line
from fastgpt.terminal import preparing, print_text


@dataclass(frozen=True, kw_only=True, slots=True)
class Arguments(PrepareOptions):
    """Tokenizes text once, for many runs, and writes it as token shards."""

    source: Annotated[str, tyro.conf.Positional]
    """Text to prepare: a name, file, folder or quoted pattern. Files are text, JSON lines (both
    also as .gz, .bz2, .xz or .zst), Parquet or Arrow. Names are builtin, shakespeare, tinystories,
    openwebtext, fineweb, fineweb-edu, and hf:owner/name[/configuration][@revision] for a dataset of
    the Hugging Face hub."""
    out: Path
    """Folder to write, which must be empty or not exist."""
    workers: int | None = None
    """Number of threads that tokenize; by default one per core. The files written do not depend on
    it."""


def main(argv: list[str] | None = None) -> None:
    """Runs the command line `argv`, by default the process's own."""
    with shown_in_one_line():
        arguments = flags.command(
            Arguments,
            sys.argv[1:] if argv is None else argv,
            prog=command("python -m fastgpt.prepare"),
        )
        with preparing() as shown:
            options: dict[str, Any] = asdict(arguments)
            options["separator"] = _unescaped(arguments.separator)
            out = prepare(**options, report=shown)
        manifest = read_manifest(out)
        train, val = (f"{split['tokens']:,}" for split in manifest["splits"].values())
        print_text(
            f"{manifest['name']}: {train} training + {val} validation tokens"
            f" ({manifest['tokenizer']} tokenizer, vocabulary {manifest['vocab_size']:,})\n"
            f"sha256 {manifest['sha256']}\nwrote {out}"
        )


def _unescaped(separator: str | None) -> str | None:
    r"""Interprets escapes such as `\n`, which a shell passes as two characters."""
    if separator is None:
        return None
    try:
        return codecs.decode(separator.encode("latin-1", "backslashreplace"), "unicode_escape")
    except UnicodeDecodeError as error:
        raise UserError(
            rf"--separator {separator!r}: expected text, with \n for a newline"
        ) from error


if __name__ == "__main__":
    main()
