"""The terminal is readable at any width, and loss.png shows the loss of the run."""

import io
import logging
import re
import sys
from contextlib import suppress

import pytest
from rich.console import Console

from fastgpt import terminal
from fastgpt.errors import UserError, shown_in_one_line
from fastgpt.logs import metrics

RECORD = {
    "step": 1234, "train_loss": 2.3456, "tok_per_s": 123456.0, "mfu": 0.2, "epoch": 1.2,
    "data_wait": 0.01, "peak_memory_gib": 70.0, "grad_norm": 0.5, "lr": 1e-3,
}  # fmt: skip
FIGURES = ("loss 2.3456  val 2.5000  123.5k tok/s  MFU 20.0%  epoch 1.20  grad norm 0.500"
           "  lr 1.00e-03  data wait 1.0%  70.0 GiB")  # fmt: skip


@pytest.mark.parametrize("width", [60, 200])
def test_the_step_and_its_most_important_figures_fit_into_any_terminal(width):
    shows = terminal.Display()
    file = io.StringIO()
    shows.console = Console(file=file, force_terminal=True, width=width, color_system=None)
    shows.start(0, 5000)
    shows.step(RECORD, 5000, 100)
    shows.doing("saving")
    shows.val_loss = 2.5  # known later than the step's own figures
    shows.doing()
    shows.stop()
    line = file.getvalue().split("\x1b[2K")[-1].split("\n")[0]
    assert len(line) == width - 3
    figures = line.split("step 1234/5000  ")[1].rstrip(" \N{HORIZONTAL ELLIPSIS}")
    assert FIGURES.startswith(figures)
    assert len(figures) >= min(width - 38, len(FIGURES))
    assert " left step 1234" in line


def test_a_log_file_has_a_line_for_each_record_and_none_for_what_is_done_between(capsys):
    shows = terminal.Display()
    shows.start(0, 5000)
    shows.doing("evaluating")
    shows.step(RECORD, 5000, 100)
    figures = FIGURES.replace("val 2.5000  ", "")
    assert capsys.readouterr().out == f"step   1234/5000  {figures}  0:01:40 left\n"


# --- a terminal of any width, and a pipe ----------------------------------------------------------

WORDS = [f"word{i}" for i in range(40)]
COMMAND = f"to resume: python {'train.py ' * 9}now"


@pytest.fixture
def written(monkeypatch):
    """Shows what a run and a command show, and returns it."""

    def show(is_terminal=True, **environment):
        screen = io.StringIO()
        screen.isatty = lambda: is_terminal
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(sys, name, screen)
        for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM"):
            monkeypatch.delenv(name, raising=False)
        for name, value in ({"TERM": "xterm", "COLUMNS": "60"} | environment).items():
            monkeypatch.setenv(name, value)
        shows = terminal.Display()
        shows.header({"model": " ".join(WORDS)})
        shows.warn("warned")
        shows.line(COMMAND)
        shows.start(0, 9)
        shows.step(RECORD | {"step": 3}, 9, 65.0)
        shows.sample(" ".join(WORDS))
        shows.stop()
        with terminal.preparing() as report:
            report(1234)
        terminal.print_text(terminal.table([("", "A"), ("name", " ".join(WORDS))]))
        terminal.print_line("error: wrong")
        return screen.getvalue()

    return show


def test_a_terminal_breaks_lines_between_words_and_has_its_own_colours(written):
    said = written()
    assert "38;" not in said  # neither RGB nor one of 256 colours
    assert "\x1b[33mwarning: warned" in said
    assert "\x1b[31merror: wrong" in said
    assert "0:01:05 left step 3/9  loss 2.3456" in said
    lines = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", said).replace("\r", "\n").splitlines()
    assert COMMAND in lines, "a command stays whole, to be copied"
    assert 60 - 12 < max(len(line) for line in lines if line != COMMAND) <= 60
    assert re.findall(r"word\w*", "\n".join(lines)) == 3 * WORDS


def test_a_dumb_terminal_gets_lines_without_colours(written):
    said = written(TERM="dumb")
    assert "\x1b" not in said
    assert "\nstep      3/9  loss 2.3456" in said


@pytest.mark.parametrize("colours", [{}, {"FORCE_COLOR": "1"}])
def test_a_pipe_gets_whole_lines_and_of_control_codes_the_colours_asked_for(written, colours):
    said = written(is_terminal=False, **colours)
    codes = {*re.findall(r"\x1b.\d*.?", said)}
    assert codes == ({"\x1b[33m", "\x1b[31m", "\x1b[0m"} if colours else set())
    assert sum(line.endswith(" word39") for line in said.splitlines()) == 3
    assert "preparing" not in said


# --- control characters ---------------------------------------------------------------------------

HOSTILE = "a\x1b]0;title\x07\x9b31m\r\u202e\u2028\ud800\x00\nz"
SHOWN, LINE = "a�]0;title��31m�����\nz\n", HOSTILE.encode("unicode_escape").decode() + "\n"


@shown_in_one_line()
def fails(also_logs):
    also_logs.handle(logging.makeLogRecord({"msg": HOSTILE, "levelname": "WARNING"}))
    raise UserError(HOSTILE)


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda: fails(logging.lastResort), f"warning: {SHOWN}error: {LINE}"),
        (lambda: terminal.Display().line(HOSTILE), SHOWN),
        (lambda: terminal.Display().warn(HOSTILE), f"warning: {LINE}"),
        (lambda: terminal.Display().header({"data": HOSTILE}), f"data        {LINE}"),
        (lambda: terminal.print_text(f"\u200c\u3000\r\n\t{HOSTILE}"), f"\u200c\u3000\n\t{SHOWN}"),
    ],
)  # fmt: skip
def test_no_control_character_reaches_a_terminal(act, said, monkeypatch):
    screen = io.StringIO()
    screen.isatty = lambda: True
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("TERM", "dumb")
    with suppress(SystemExit):
        act()
    assert screen.getvalue().replace(" \n", "\n") == said


def test_generated_text_is_exact_in_a_file_and_harmless_on_a_terminal(capsys):
    terminal.print_text("\x1b[1m\r\n")
    assert capsys.readouterr().out == "\x1b[1m\r\n\n"
    terminal.Display().sample("ab�\x00")
    assert "\nab��\n" in capsys.readouterr().out


# --- loss.png -------------------------------------------------------------------------------------


def test_the_plot_has_plain_ticks_and_marks_the_lowest_loss_that_compares(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig", lambda self, *_, **__: drawn.append(self)
    )
    losses = [(5.0, 9), (4.2, 9), (4.5, 9), (3.5, 50)]
    records = [{"step": i, "tokens": 100 * i, "val_loss": loss, "val_tokens": size}
               for i, (loss, size) in enumerate(losses)]  # fmt: skip
    metrics.plot_losses(records, tmp_path / "loss.png", "title")
    drawn[0].draw_without_rendering()
    [axes] = drawn[0].axes
    assert axes.lines[-1].get_xydata().tolist() == [[100.0, 4.2]]
    ticks = [tick.get_text() for tick in axes.get_yticklabels(which="both")]
    assert sum(3.5 <= float(tick) <= 5 for tick in ticks if tick) > 2
