"""Writes a page about runs: `python -m fastgpt.report RUN [RUN ...] [-o page.html]`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from fastgpt import flags
from fastgpt.commands import install_command
from fastgpt.config.checks import check_fields
from fastgpt.errors import UserError, run_command
from fastgpt.terminal import print_text


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportConfig:
    """Writes a page about a run, or about several to compare them, for any browser."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of the runs."""
    out: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """Page to write; by default report.html, in the folder of the run, or for several runs in the
    current folder."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.runs:
            raise UserError("no RUN was given: expected the folder of a run, such as runs/NAME")


def main(argv: list[str]) -> None:
    """Runs the command line `argv`."""
    config = flags.command(ReportConfig, argv, prog="python -m fastgpt.report")
    try:
        from fastgpt.report.page import write_report
    except ImportError as error:
        how = install_command("report", "bokeh")
        raise UserError(f"a report needs {error.name}: {how}") from error
    folder = config.runs[0] if len(config.runs) == 1 else Path()
    out = folder / "report.html" if config.out is None else config.out
    if config.out is not None and (out.is_dir() or not out.absolute().parent.is_dir()):
        raise UserError(f"--out is {out}: expected a file in a folder that exists")
    write_report(config.runs, out)
    print_text(f"wrote {out.absolute()}")


if __name__ == "__main__":
    run_command(main)
