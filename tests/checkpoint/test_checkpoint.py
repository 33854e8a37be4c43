"""A checkpoint is complete or absent, whatever happens while it is written or kept."""

import errno
import gc
import math
import os
import re
import shlex
import shutil
import threading
from contextlib import closing
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch

from fastgpt.checkpoint import checkpoint
from fastgpt.checkpoint.checkpoint import FORMAT_VERSION, SIDE_FILES, WEIGHT_FILES, Saver
from fastgpt.cli import configure
from fastgpt.data.tokenizers import ByteTokenizer
from fastgpt.errors import UserError
from fastgpt.guards.nonfinite import check_weights
from fastgpt.train.trainer import Trainer
from tests.runs import Crash, before_each, files_of_at_most

FIXED = {
    "config_json": "{}", "save_tokenizer": ByteTokenizer().save, "huggingface_json": "{}",
}  # fmt: skip


def content_of(step, numbers=8):
    """Returns the weights and the state of a small checkpoint."""
    weights = {"wte.weight": torch.full((numbers,), float(step)), "a.bias": torch.ones(2)}
    state = {"optimizers": {"exp_avg": torch.randn(numbers)}, "loader": {"epoch": 0, "index": step}}
    return weights, state


def save(folder, step, *, keep=3, numbers=8):
    weights, state = content_of(step, numbers)
    return checkpoint.save(folder, step, weights=weights, state=state, **FIXED, keep=keep)


def content(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run" / "checkpoints"


def test_what_is_saved_is_read_back(folder):
    synced, fsync = set(), os.fsync
    with mock.patch("os.fsync", lambda file: synced.add(os.fstat(file).st_ino) or fsync(file)):
        saved = checkpoint.load(save(folder, 5))
    assert {path.stat().st_ino for path in (folder, saved.path, *saved.path.iterdir())} == synced
    assert (saved.path, saved.step) == (folder / "step_00000005", 5)
    assert saved.weights["wte.weight"].tolist() == [5.0] * 8
    assert saved.state["loader"] == {"epoch": 0, "index": 5}
    assert saved.state["optimizers"]["exp_avg"].is_cpu, "a device may have no room for it"
    assert content(saved.path) == sorted([*WEIGHT_FILES, *SIDE_FILES, "checkpoint.json"])
    modes = {path.stat().st_mode for path in saved.path.iterdir()}
    assert len(modes) == 1, "others may read either all of it or nothing"


def test_last_ones_stay_and_the_best_one(folder):
    best = save(folder, 1, keep=2)
    checkpoint.mark_best(best)
    inode = (best / "model.safetensors").stat().st_ino
    for step in range(2, 6):
        save(folder, step, keep=2)
    assert content(folder) == ["best", "step_00000004", "step_00000005"]
    assert checkpoint.load(folder / "best").step == 1
    # a link and not a copy: the best one costs no disk while its twin stays
    assert (folder / "best" / "model.safetensors").stat().st_ino == inode
    checkpoint.mark_best(folder / "step_00000005")
    assert checkpoint.load(folder / "best").step == 5
    assert (folder / "step_00000005" / "state.pt").stat().st_nlink == 2
    with mock.patch.object(os, "link", side_effect=OSError(errno.EPERM, "no links here")):
        checkpoint.mark_best(folder / "step_00000004")
    assert checkpoint.load(folder / "best").step == 4


def killed_while_saving(folder, line):
    """Interrupts a save at its `line`-th line; returns False if it has fewer.

    Only threads change the disk; wherever the main one is killed, they stop between two lines.
    """
    left, before = line, threading.gettrace()

    def trace(frame, event, _):
        nonlocal left
        if frame.f_code.co_filename not in (checkpoint.__file__, shutil.__file__):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise Crash
        return trace

    threading.settrace(trace)
    try:
        with closing(Saver(folder, **FIXED, keep=2)) as thread:
            thread.save(3, *content_of(3))
            thread.mark_best(3)
    except Crash:
        return True
    except UserError as error:  # of shutil's cleaning up after the crash
        if not isinstance(getattr(error.__cause__, "__context__", None), Crash):
            raise
        return True
    finally:
        threading.settrace(before)
    return False


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # the dead close no files
def test_a_crash_between_any_two_lines_leaves_whole_checkpoints_and_no_litter_for_long(
    folder, tmp_path, monkeypatch
):
    monkeypatch.setattr("os.fsync", int)  # only a power cut would tell, and it takes most time
    before, line = tmp_path / "before", 1
    for step in (1, 2):  # the first is to be removed, the second to stay
        checkpoint.mark_best(save(before, step))
    while killed_while_saving(shutil.copytree(before, folder), line):
        steps = [checkpoint.load(path).step for path in checkpoint.steps_on_disk(folder)]
        assert steps in ([1, 2], [1, 2, 3], [2, 3]), f"killed at line {line}"
        checkpoint.mark_best(save(folder, 4, keep=2))
        hidden = [name for name in content(folder) if name.startswith(".")]
        assert hidden == [], f"killed at line {line}"
        shutil.rmtree(folder)
        line += 1
    gc.collect()
    assert line > 50, "the crashes were not where they were meant to be"


NO_SPACE = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fail(*_, error=NO_SPACE, **__):
    raise error


def write_half(path, *_):
    path.write_bytes(b"half")
    raise NO_SPACE


@pytest.mark.parametrize(
    ("where", "failing"),
    [
        ("fastgpt.checkpoint.tensors.write", write_half),
        ("torch.save", partial(fail, error=RuntimeError(NO_SPACE.strerror))),
        ("os.fsync", fail),
        ("pathlib.Path.rename", fail),
    ],
)
def test_full_disk_is_said_plainly_and_costs_no_earlier_checkpoint(
    folder, monkeypatch, where, failing
):
    good = save(folder, 1)
    monkeypatch.setattr(where, failing)
    with pytest.raises(UserError, match=r"^no space left .* step 2 was not saved$"):
        save(folder, 2)
    monkeypatch.undo()
    assert content(folder) == [good.name]
    assert checkpoint.load(good).step == 1


@pytest.mark.parametrize("numbers", [20_000, 14_800], ids=["weights", "state"])
def test_real_failed_writes_are_reported(folder, numbers):
    """A limit of 60 kB on files acts as a full disk: state.pt is 1 kB longer."""
    good = save(folder, 1)
    with files_of_at_most(60_000), pytest.raises(UserError, match="File too large"):
        save(folder, 2, numbers=numbers)
    assert content(folder) == [good.name]


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("damage", [flip, cut, Path.unlink])
@pytest.mark.parametrize("name", [*WEIGHT_FILES, *SIDE_FILES])
def test_damaged_newest_gives_way_to_the_one_before(folder, name, damage):
    save(folder, 1)
    newest = save(folder, 2)
    damage(newest / name)
    found, [complaint] = checkpoint.find(str(folder.parent))
    assert found.step == 1
    assert str(newest) in complaint
    assert name in complaint
    for state, hint in ((True, rf"; .* --resume {found.path}"), (False, "")):
        with pytest.raises(UserError, match=rf"{name}.*the valid one .* {found.path}{hint}$"):
            checkpoint.find(str(newest), state=state)


def test_renamed_checkpoint_is_refused(folder):
    saved = save(folder, 15)
    copy = shutil.copytree(saved, folder / "mine")
    saved.rename(folder / "step_00000020")
    with pytest.raises(UserError, match=rf"is of step 15: expected the name {saved};"):
        checkpoint.find(f"{folder}/step_00000020")
    assert checkpoint.find(str(copy))[0].step == 15
    flip(copy / "state.pt")
    with pytest.raises(UserError, match=r"mine is damaged: state\.pt .*; none before it is valid"):
        checkpoint.find(str(copy))


@pytest.mark.parametrize("name", ["wte.weight", "exp_avg"])
def test_numbers_that_are_not_finite_are_not_resumed_from(fit, monkeypatch, name):
    def spoil(_, step, weights, state, **__):
        if step == 8:
            (weights | state["optimizers"]["optimizers"][0]["state"][0])[name][0] = math.inf

    before_each(monkeypatch, Saver, "save", spoil)
    run = fit("--train.sample-tokens 0")
    with pytest.raises(UserError, match=r"step_00000008 is damaged: step 8: .* not fin") as caught:
        fit("--resume auto")
    words = shlex.split(str(caught.value).rpartition("; to resume there: ")[2])
    assert words[2:] == ["--resume", f"{run}/checkpoints/step_00000004"]
    monkeypatch.undo()
    Trainer(configure(words[2:])).fit()


@pytest.mark.parametrize(
    ("written", "said"),
    [
        *((damaged, r"not a checkpoint: .*checkpoint\.json") for damaged in ("{", "{}", "[]")),
        ('{"format_version": 99}', f"has format version 99: expected {FORMAT_VERSION}"),
        ('{"format_version": 2, "sha256": {"state.json": ""}}', "version 0.2"),
    ],
)
def test_damaged_record_gives_way_to_the_one_before(folder, written, said):
    save(folder, 1)
    (save(folder, 2) / "checkpoint.json").write_text(written)
    found, [complaint] = checkpoint.find(str(folder.parent))
    assert found.step == 1
    assert re.search(said, complaint)


def test_nothing_good_is_an_error_that_names_each(folder):
    flip(save(folder, 1) / "state.pt")
    flip((newest := save(folder, 2)) / "config.json")
    for path, other in ((folder.parent, r".*state\.pt has sha256"), (newest, "none before it")):
        with pytest.raises(UserError, match=rf"config\.json has sha256.*; {other}"):
            checkpoint.find(str(path))


def test_weights_that_are_not_finite_are_not_saved(tiny, tmp_path):
    """No token uses their row of the table: loss and gradients are finite."""
    trainer = Trainer(configure(tiny("--model.no-tied --eval-every 0")))
    table = dict(trainer.run.model.named_parameters())["wte.weight"]
    with torch.no_grad():
        table[200, 3] = math.nan
    with pytest.raises(UserError, match=r"step 8: .* not finite: wte\.weight; there is no"):
        trainer.fit()
    assert content(tmp_path / "run" / "checkpoints") == []


def test_weights_that_are_finite_may_have_a_sum_that_is_not(tiny):
    run = Trainer(configure(tiny())).run
    with torch.no_grad():
        run.model.get_parameter("wte.weight")[200:204] = 3e38
    check_weights(run.optimizers.named.items(), run.step)
