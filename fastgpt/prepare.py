"""`python -m fastgpt.prepare SOURCE --out DIR`: tokenizes a corpus once, for many runs.

Then `--data.source DIR` trains on it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from fastgpt.corpus import prepare, read_manifest
from fastgpt.errors import shown_in_one_line


@dataclass(frozen=True, kw_only=True, slots=True)
class Arguments:
    """Tokenizes a corpus and writes it as token shards in llm.c's format."""

    source: Annotated[str, tyro.conf.Positional]
    """`builtin`, `shakespeare`, a text file, or a folder of text files."""
    out: Path
    """Directory to write; it must be empty or not exist."""
    tokenizer: Literal["auto", "bytes", "chars", "gpt2"] = "auto"
    """auto: chars for shakespeare, bytes for everything else."""
    val_fraction: float = 0.1
    """Part at the end of the text that is kept for validation, between 0 and 1."""


def main(argv: list[str] | None = None) -> None:
    """Runs the command line `argv`, by default the process's own."""
    arguments = tyro.cli(Arguments, args=argv, prog="python -m fastgpt.prepare")
    with shown_in_one_line():
        out = prepare(
            arguments.source,
            arguments.out,
            tokenizer=arguments.tokenizer,
            val_fraction=arguments.val_fraction,
        )
        print(_summary(out))


def _summary(path: Path) -> str:
    manifest = read_manifest(path)
    tokens = {split: entry["tokens"] for split, entry in manifest["splits"].items()}
    python = f", Python {manifest['python']}" if manifest["python"] else ""
    return (
        f"{manifest['name']}{python}: {tokens['train']:,} tokens to train on,"
        f" {tokens['val']:,} to validate on"
        f" ({manifest['tokenizer']}, vocabulary {manifest['vocab_size']:,})\n"
        f"sha256 {manifest['sha256']}\n"
        f"wrote {path}"
    )


if __name__ == "__main__":
    main()
