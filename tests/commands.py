"""Collects the commands in the Makefile, README, CONTRIBUTING and docs, and makes each one short.

They are read from the files, so that none is forgotten; `test_commands` runs them.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = ("make", "python", "torchrun", "fastgpt-train", "fastgpt-sample", "fastgpt-prepare")


@dataclass(frozen=True, slots=True)
class Command:
    """A shell command from the Makefile or a documentation page in Markdown."""

    text: str
    page: str
    line: int

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text, comments=True)


def commands() -> list[Command]:
    """Returns every documented command once: `make` with each target, then those on the pages."""
    targets = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.M)
    found = [Command(f"make {target}", "Makefile", 0) for target in targets]
    for page in PAGES:
        name = page.relative_to(ROOT).as_posix()
        found += [Command(text, name, line) for line, text in commands_in(page.read_text())]
    return list({command.text: command for command in reversed(found)}.values())[::-1]


def commands_in(page: str) -> Iterator[tuple[int, str]]:
    """Yields (line number, command) for a page's text, from code blocks and inline code."""
    blocks = re.split(r"^```.*\n", page, flags=re.M)
    line = 1
    for i, block in enumerate(blocks):
        if i % 2:  # inside of a block
            text = re.sub(r"\\\n\s*", lambda m: " " * len(m[0]), block)
            pieces = [(m.start(), m[0]) for m in re.finditer(r"^.+$", text, re.M)]
        else:
            pieces = [(m.start(), m[1]) for m in re.finditer(r"`([^`]+)`", block)]
        for start, piece in pieces:
            piece = " ".join(re.split(r"\s+#\s", piece)[0].removeprefix("$ ").split())
            if piece.split(" ")[0] in PROGRAMS and " " in piece and "[" not in piece:
                yield line + block.count("\n", 0, start), piece
        line += block.count("\n") + 1
