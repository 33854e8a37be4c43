"""`python -m fastgpt.data DIR`: shows what a data set holds, and checks it with `--verify`.

DIR is a prepared directory, or a folder of token shards that another program wrote.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.progress import track
from rich.table import Table
from rich.text import Text

from fastgpt import flags
from fastgpt.data.corpus import SPLITS, Corpus, open_shards
from fastgpt.data.verify import check_shard
from fastgpt.errors import UserError, counted, shown_in_one_line
from fastgpt.files import cores
from fastgpt.terminal import one_line, printable

EXCERPT_TOKENS, SEED = 100, 1337
"""Length of an excerpt, and the seed of their places."""
EXCERPT_CHARACTERS = 10_000
"""Most characters shown of an excerpt: a foreign tokenizer may make any number of a token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arguments:
    """Shows what a data set holds, and checks it."""

    path: Annotated[Path, tyro.conf.Positional]
    """Folder of token shards: ours, llm.c's or modded-nanogpt's."""
    excerpts: int = 2
    """Number of random excerpts to show."""
    verify: bool = False
    """Check every byte: each shard's sha256 and token ids."""
    tokenizer: str = "auto"
    """Tokenizer of shards without a tokenizer.json beside them. It is gpt2, or the path of such a
    file."""


def main(argv: list[str] | None = None) -> None:
    """Runs the command line `argv`, by default the process's own."""
    with shown_in_one_line():
        arguments = flags.parse(
            Arguments,
            sys.argv[1:] if argv is None else argv,
            prog="python -m fastgpt.data",
        )
        if arguments.excerpts < 0:
            raise UserError(f"--excerpts is {arguments.excerpts}: expected 0 or more")
        path = arguments.path.expanduser()
        if not path.is_dir():
            raise UserError(f"{path}: no such folder")
        corpus = open_shards(path, tokenizer=arguments.tokenizer)
        tokenizer, end = corpus.tokenizer, corpus.tokenizer.eot_id
        console = Console(highlight=False, soft_wrap=True, emoji=False)
        console.print(_overview(corpus))
        facts = (
            f"tokenizer {tokenizer.kind}, vocabulary {tokenizer.vocab_size:,}, end of text"
            f" {'none' if end is None else end}, {corpus.train.dtype}\nsha256 {corpus.sha256}"
        )
        console.print(printable(facts), markup=False)
        draws = np.random.default_rng(SEED)
        for _ in range(arguments.excerpts):
            start = int(draws.integers(max(1, len(corpus.train) - EXCERPT_TOKENS)))
            ids = corpus.train[start : start + EXCERPT_TOKENS]
            title = f"train, tokens {start:,} to {start + len(ids) - 1:,}"
            text = Text(printable(tokenizer.decode(ids)[:EXCERPT_CHARACTERS]))
            console.print(Panel(text, title=title, title_align="left"), soft_wrap=False)
        if arguments.verify:
            shards, size = corpus.shards(), tokenizer.vocab_size
            with ThreadPoolExecutor(cores()) as pool:
                done = pool.map(lambda path: check_shard(path, shards[path], size), shards)
                for _ in track(done, "verifying", len(shards), console=console, transient=True):
                    pass
            what = "sha256 and ids" if corpus.manifest else "ids"
            console.print(f"verified: {what} of {counted(len(shards), 'shard')}")


def _overview(corpus: Corpus) -> Table:
    tokens = [getattr(corpus, split) for split in SPLITS]
    sizes = [len(t) for t in tokens]
    table = Table(title=escape(one_line(f"{corpus.name} ({corpus.path})")), title_justify="left")
    for column in ("", *SPLITS):
        table.add_column(column, justify="right" if column else "left")
    table.add_row("tokens", *(f"{size:,}" for size in sizes))
    table.add_row("shards", *(f"{len(t.paths):,}" for t in tokens))
    if corpus.tokenizer.eot_id is not None:
        counts = [len(corpus.document_starts(split)) for split in SPLITS]
        table.add_row("documents", *(f"{count:,}" for count in counts))
        means = (f"{size / count:,.1f}" for size, count in zip(sizes, counts))
        table.add_row("tokens per document", *means)
    if corpus.manifest:
        lengths = [corpus.manifest["splits"][split]["bytes"] for split in SPLITS]
        table.add_row("bytes of text", *(f"{length:,}" for length in lengths))
        table.add_row("bytes per token", *(f"{n / size:.2f}" for n, size in zip(lengths, sizes)))
    return table


if __name__ == "__main__":
    main()
