"""`python -m fastgpt.data DIR`: shows what a data set holds, and checks it with `--verify`.

DIR is a prepared directory, or a folder of token shards that another program wrote.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
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

from fastgpt.config import flags
from fastgpt.data.corpus import SPLITS, Corpus, open_shards
from fastgpt.data.verify import check_shard
from fastgpt.errors import UserError, counted, shown_in_one_line
from fastgpt.files import cores
from fastgpt.terminal import one_line, printable

QUANTILES = (0, 0.05, 0.25, 0.5, 0.75, 0.95, 1)
BAR_WIDTH = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Arguments:
    """Shows what a data set holds, and checks it."""

    path: Annotated[Path, tyro.conf.Positional]
    """Folder of token shards: ours, llm.c's or modded-nanogpt's."""
    excerpts: int = 2
    """Number of random excerpts to show."""
    length: int = 100
    """Number of tokens in each excerpt."""
    seed: int = 1337
    """Random seed for choosing the excerpts."""
    verify: bool = False
    """Check every byte: checksums and token ids."""
    plot: Path | None = None
    """File to draw the document lengths to, a .png, .svg or .pdf."""
    tokenizer: str = "auto"
    """Tokenizer of shards without a tokenizer.json beside them. It is gpt2, or the path of such a
    file."""

    def __post_init__(self) -> None:
        for name, least in (("excerpts", 0), ("length", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise UserError(f"--{name} is {getattr(self, name)}: expected {least} or more")


def main(argv: list[str] | None = None) -> None:
    """Runs the command line `argv`, by default the process's own."""
    with shown_in_one_line():
        arguments = flags.parse(
            Arguments,
            sys.argv[1:] if argv is None else argv,
            prog="python -m fastgpt.data",
            first=[field.name for field in fields(Arguments)],
        )
        path = arguments.path.expanduser()
        if not path.is_dir():
            raise UserError(f"{path}: no such folder")
        corpus = open_shards(path, tokenizer=arguments.tokenizer)
        console = Console(highlight=False, soft_wrap=True, emoji=False)
        console.print(_overview(corpus))
        console.print(printable(_facts(corpus)), markup=False)
        if corpus.tokenizer.eot_id is not None:
            _show_lengths(corpus, console, arguments.plot)
        elif arguments.plot is not None:
            corpus.document_starts("train")  # raises: without documents there is nothing to plot
        _show_excerpts(corpus, console, arguments)
        if arguments.verify:
            _verify(corpus, console)


def _overview(corpus: Corpus) -> Table:
    tokenizer, manifest = corpus.tokenizer, corpus.manifest
    table = Table(title=escape(one_line(f"{corpus.name} ({corpus.path})")), title_justify="left")
    for column in ("", *SPLITS):
        table.add_column(column, justify="right" if column else "left")
    tokens = {split: getattr(corpus, split) for split in SPLITS}
    table.add_row("tokens", *(f"{len(t):,}" for t in tokens.values()))
    table.add_row("shards", *(f"{len(t.paths):,}" for t in tokens.values()))
    if tokenizer.eot_id is not None:
        counts = [len(corpus.document_starts(split)) for split in SPLITS]
        table.add_row("documents", *(f"{count:,}" for count in counts))
    if manifest:
        sizes = [manifest["splits"][split]["bytes"] for split in SPLITS]
        table.add_row("bytes of text", *(f"{size:,}" for size in sizes))
        ratios = [f"{size / len(t):.2f}" for size, t in zip(sizes, tokens.values())]
        table.add_row("bytes per token", *ratios)
    return table


def _facts(corpus: Corpus) -> str:
    tokenizer = corpus.tokenizer
    end = "none" if tokenizer.eot_id is None else f"{tokenizer.eot_id}"
    return (
        f"tokenizer {tokenizer.kind}, vocabulary {tokenizer.vocab_size:,}, end of text {end},"
        f" {corpus.train.dtype}\nsha256 {corpus.sha256}"
    )


def _lengths(corpus: Corpus, split: str) -> np.ndarray:
    """Counts the tokens of each document, its end-of-text token included."""
    starts = corpus.document_starts(split)
    return np.diff(starts, append=len(getattr(corpus, split)))


def _show_lengths(corpus: Corpus, console: Console, plot: Path | None) -> None:
    lengths = _lengths(corpus, "train")
    values = np.quantile(lengths, QUANTILES, method="nearest")
    shown = ", ".join(f"{q:.0%} {value:,}" for q, value in zip(QUANTILES, values.tolist()))
    console.print(f"\ntokens per training document: {shown}; mean {lengths.mean():,.1f}")
    edges = _edges(lengths)
    counts, _ = np.histogram(lengths, edges)
    for low, high, count in zip(edges, edges[1:], counts.tolist()):
        bar = "█" * round(BAR_WIDTH * count / counts.max())
        console.print(f"{low:>12,} to {high - 1:<12,} {bar:<{BAR_WIDTH}} {count:,}")
    if plot is not None:
        _draw(corpus, plot)
        console.print(one_line(f"plot: {plot}"), markup=False)


def _edges(lengths: np.ndarray) -> np.ndarray:
    """Returns the powers of two around all lengths."""
    shortest, longest = int(lengths.min()), int(lengths.max())
    return 2 ** np.arange(shortest.bit_length() - 1, longest.bit_length() + 1)


def _draw(corpus: Corpus, path: Path) -> None:
    from matplotlib.figure import Figure  # slow to import, and needed here only

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for split in SPLITS:
        lengths = _lengths(corpus, split)
        axes.hist(lengths, _edges(lengths).tolist(), histtype="step", label=split)
    axes.set(yscale="log", xlabel="tokens per document", ylabel="documents")
    axes.set_xscale("log", base=2)
    axes.set_title(f"{corpus.name}, {corpus.tokenizer.kind} tokens")
    axes.legend()
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise UserError(f"--plot {path}: {error}") from error


def _show_excerpts(corpus: Corpus, console: Console, arguments: Arguments) -> None:
    draws = np.random.default_rng(arguments.seed)
    for _ in range(arguments.excerpts):
        start = int(draws.integers(max(1, len(corpus.train) - arguments.length)))
        ids = corpus.train[start : start + arguments.length]
        title = f"train, tokens {start:,} to {start + len(ids) - 1:,}"
        text = Text(printable(corpus.tokenizer.decode(ids)))
        console.print(Panel(text, title=title, title_align="left"))


def _verify(corpus: Corpus, console: Console) -> None:
    shards, vocab_size = corpus.shards(), corpus.tokenizer.vocab_size
    with ThreadPoolExecutor(cores()) as pool:
        done = pool.map(lambda shard: check_shard(shard, vocab_size), shards)
        for _ in track(done, "verifying", total=len(shards), console=console, transient=True):
            pass
    what = "ids" if shards[0].sha256 is None else "sha256, CRC-32 and ids"
    console.print(f"verified: {what} of {counted(len(shards), 'shard')}")


if __name__ == "__main__":
    main()
