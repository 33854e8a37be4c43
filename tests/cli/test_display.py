"""The terminal is readable at any width, and loss.png shows the loss of the run."""

import io
import logging
from contextlib import suppress

import pytest
from rich.console import Console

from fastgpt import display, terminal
from fastgpt.errors import UserError, shown_in_one_line
from fastgpt.logs import metrics

RECORD = {
    "step": 1234, "train_loss": 2.3456, "tok_per_s": 123456.0, "mfu": 0.2, "epoch": 1.2,
    "data_wait": 0.01, "peak_memory_gib": 70.0, "grad_norm": 0.5, "lr": 1e-3,
}  # fmt: skip
FIGURES = ("loss 2.3456  val 2.5000  123.5k tok/s  MFU 20.0%  epoch 1.20  grad norm 0.500"
           "  lr 1.00e-03  data wait 1.0%  70.0 GiB")  # fmt: skip


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_the_step_and_its_most_important_figures_fit_into_any_terminal(width):
    shows = display.Display()
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


def test_a_terminal_breaks_facts_and_figures_between_words_and_no_command():
    shows = display.Display()
    shows.console = Console(file=io.StringIO(), force_terminal=True, width=24, color_system=None)
    shows.header({"model": "19 activations"})
    shows.line("step      9  val loss 2.3456")
    shows.line("to resume: python train.py")
    assert [line.rstrip() for line in shows.console.file.getvalue().splitlines()] == [
        *("model       19", "activations", "step      9  val loss", "2.3456"),
        "to resume: python train.py",
    ]


def test_a_log_file_has_a_line_for_each_record_and_none_for_what_is_done_between(capsys):
    shows = display.Display()
    shows.start(0, 5000)
    shows.doing("evaluating")
    shows.step(RECORD, 5000, 100)
    figures = FIGURES.replace("val 2.5000  ", "")
    assert capsys.readouterr().out == f"step   1234/5000  {figures}  1 min 40 s left\n"


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
        (lambda: display.Display().line(HOSTILE), SHOWN),
        (lambda: display.Display().warn(HOSTILE), f"warning: {LINE}"),
        (lambda: display.Display().header({"data": HOSTILE}), f"data        {LINE}"),
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
    display.Display().sample("ab�\x00")
    assert "\nab��\n" in capsys.readouterr().out


# --- loss.png -------------------------------------------------------------------------------------


@pytest.mark.parametrize("points", [0, 1, 2, 50])
def test_a_run_of_any_length_has_a_plot(tmp_path, points):
    records = [{"step": 0, "tokens": 0, "val_loss": 5.0}]
    for i in range(1, points + 1):
        about = {"step": i, "tokens": 100 * i}
        records += [{**about, "train_loss": 5.0 / i, "tok_per_s": 10.0}, {**about, "val_loss": 4.0}]
    metrics.plot_losses(records, tmp_path / "loss.png", "title")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


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
