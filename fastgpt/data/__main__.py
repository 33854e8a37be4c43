"""`python -m fastgpt.data DIR`: shows what a dataset holds, and checks it with `--verify`.

DIR is a prepared directory, or a folder of token shards that another program wrote.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from fastgpt import flags
from fastgpt.data.corpus import SPLITS, Corpus, open_shards
from fastgpt.data.verify import check_all
from fastgpt.errors import UserError, counted, shown_in_one_line
from fastgpt.terminal import print_text, table


@dataclass(frozen=True, kw_only=True, slots=True)
class Arguments:
    """Shows what a dataset holds, and checks it."""

    path: Annotated[Path, tyro.conf.Positional]
    """Folder of token shards: ours, llm.c's or modded-nanogpt's."""
    verify: bool = False
    """Check every byte: each shard's sha256 and token ids."""
    tokenizer: str = "auto"
    """Tokenizer of shards without a tokenizer.json beside them. It is gpt2, or the path of such a
    file."""


def main(argv: list[str] | None = None) -> None:
    """Runs the command line `argv`, by default the process's own."""
    with shown_in_one_line():
        arguments = flags.command(
            Arguments, sys.argv[1:] if argv is None else argv, prog="python -m fastgpt.data"
        )
        path = arguments.path.expanduser()
        if not path.is_dir():
            raise UserError(f"{path}: no such folder")
        corpus = open_shards(path, tokenizer=arguments.tokenizer)
        print_text("\n".join(overview(corpus)))
        if arguments.verify:
            shards = corpus.shards()
            check_all(shards, corpus.tokenizer.vocab_size)
            what = "sha256 and ids" if corpus.manifest else "ids"
            print_text(f"verified: {what} of {counted(len(shards), 'shard')}")


def overview(corpus: Corpus) -> Iterator[str]:
    """Yields lines about a corpus; the table has a column for each split."""
    tokens, tokenizer = [getattr(corpus, split) for split in SPLITS], corpus.tokenizer
    sizes = [len(t) for t in tokens]
    rows = {"": SPLITS, "tokens": [f"{size:,}" for size in sizes]}
    rows["shards"] = [f"{len(t.paths):,}" for t in tokens]
    if tokenizer.eot_id is not None:
        counts = [len(corpus.document_starts(split)) for split in SPLITS]
        rows["documents"] = [f"{count:,}" for count in counts]
        rows["tokens per document"] = [f"{n / count:,.1f}" for n, count in zip(sizes, counts)]
    if corpus.manifest:
        lengths = [corpus.manifest["splits"][split]["bytes"] for split in SPLITS]
        rows["bytes of text"] = [f"{length:,}" for length in lengths]
        rows["bytes per token"] = [f"{n / size:.2f}" for n, size in zip(lengths, sizes)]
    yield f"{corpus.name} ({corpus.path})"
    yield table(((name, *cells) for name, cells in rows.items()), right=(1, 2))
    end = "none" if tokenizer.eot_id is None else tokenizer.eot_id
    yield (
        f"tokenizer {tokenizer.kind}, vocabulary {tokenizer.vocab_size:,}, end of text {end},"
        f" {corpus.train.dtype}"
    )
    yield f"sha256 {corpus.sha256}"


if __name__ == "__main__":
    main()
