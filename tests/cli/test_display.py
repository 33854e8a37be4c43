"""The terminal is readable at any width, and loss.png shows the loss of the run."""

import io
import logging
import re
from contextlib import suppress

import pytest

from fastgpt import terminal
from fastgpt.errors import UserError, shown_in_one_line
from fastgpt.logs import metrics


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_step_and_a_long_command_are_shown_on_a_terminal_and_in_a_file(is_terminal, monkeypatch):
    screen = io.StringIO()
    screen.isatty = lambda: is_terminal
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    keys = ("epoch", "data_wait", "peak_memory_gib", "grad_norm", "lr", "mfu", "tok_per_s")
    record = dict.fromkeys(keys, 0.5) | {"step": 3, "train_loss": 2.3456}
    words, command = [f"word{i}" for i in range(40)], f"to resume: python {'train.py ' * 9}now"
    shows = terminal.Display()
    shows.header({"model": " ".join(words)})
    shows.line(command)
    shows.start(0, 9)
    shows.doing("saving")
    shows.step(record, 9, 65.0)
    shows.stop()
    lines = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", screen.getvalue()).replace("\r", "\n").splitlines()
    assert command in lines, "a command stays whole, to be copied"
    said = "0:01:05 left step 3/9  loss 2.3456" if is_terminal else "step      3/9  loss 2.3456"
    assert lines[-1].startswith(said)
    assert re.findall(r"word\w*", "\n".join(lines)) == words
    assert ("saving" in "".join(lines)) == is_terminal
    assert any(line.endswith(words[-1]) and words[0] in line for line in lines) != is_terminal


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


def test_the_plot_marks_the_lowest_loss_that_compares(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig", lambda self, *_, **__: drawn.append(self)
    )
    losses = [(5.0, 9), (4.2, 9), (4.5, 9), (3.5, 50)]
    records = [{"step": i, "tokens": 100 * i, "val_loss": loss, "val_tokens": size}
               for i, (loss, size) in enumerate(losses)]  # fmt: skip
    metrics.plot_losses(records, tmp_path / "loss.png", "title")
    assert drawn[0].axes[0].lines[-1].get_xydata().tolist() == [[100.0, 4.2]]
