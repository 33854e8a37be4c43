"""Checkpoints are written by a thread while training goes on, and no run ends before they are."""

import threading
from contextlib import closing, nullcontext
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fastgpt.checkpoint import checkpoint, tensors
from fastgpt.checkpoint.checkpoint import Saver, Snapshot
from fastgpt.cli import configure
from fastgpt.data.tokenizers import ByteTokenizer
from fastgpt.errors import UserError
from fastgpt.train.trainer import Trainer, train
from tests.runs import at_step, before_each, terminate

FIXED = {"config_json": "{}", "save_tokenizer": ByteTokenizer().save, "keep": 3}


@pytest.fixture
def opened(monkeypatch):
    """An event for which threads that write a checkpoint wait; the main one does not."""
    event = threading.Event()

    def wait(*_):
        assert threading.current_thread() is threading.main_thread() or event.wait(60)

    before_each(monkeypatch, tensors, "write", wait)
    yield event
    event.set()


@pytest.mark.cpu  # saved in line, tensors of CUDA say that they were there
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_files_are_those_of_a_save_in_line_though_training_goes_on(tiny, tmp_path, opened, kind):
    run = Trainer(configure(tiny(f"--optim.kind {kind}"))).run
    with closing(Saver(tmp_path / "thread", **FIXED)) as saver:
        for _ in range(2):  # the second time the memory is there
            opened.clear()
            train(run, run.step + 1)
            tree = dict(zip(("weights", "state"), run.snapshot()))
            saver.save(run.step, **tree)
            assert saver.has(run.step)
            expected = checkpoint.save(tmp_path / "in-line", run.step, **tree, **FIXED)
            train(run, run.step + 1)
            found = tmp_path / "thread" / expected.name
            assert not found.exists()
            opened.set()
            saver.wait()
            for path in expected.iterdir():
                assert (found / path.name).read_bytes() == path.read_bytes(), path.name


def test_copies_are_made_in_memory_that_is_there(tmp_path):
    snapshot, tensor = Snapshot(), torch.ones(3, 4)
    tree = {"a": [tensor, tensor[:2]], "same": tensor, "rest": (1, "b")}
    first = snapshot.take(tree)
    assert first["a"][0] is first["same"], "what was one tensor stays one"
    tensor.fill_(2.0)
    assert first["a"][0].eq(1).all()
    with mock.patch("torch.empty_like", side_effect=AssertionError):
        second = snapshot.take(tree)
    assert first["a"][1].data_ptr() == second["a"][1].data_ptr() != tensor.data_ptr()
    assert second["a"][1].tolist() == [[2.0] * 4] * 2
    assert second["rest"] is tree["rest"]
    no_memory = RuntimeError("can't allocate memory")
    with mock.patch("torch.empty_like", side_effect=no_memory), pytest.raises(UserError):
        Snapshot().take(tree)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_copies_from_a_gpu_are_waited_for_once(device):
    with FakeTensorMode(), mock.patch("torch.cuda.current_stream") as stream:
        taken = Snapshot().take([torch.empty(size, device=device) for size in (3, 4)])
    assert [str(tensor.device) for tensor in taken] == ["cpu", "cpu"]
    assert stream.mock_calls == [mock.call(), mock.call().synchronize()] * (device == "cuda")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_thread_has_the_gpu_of_its_rank(tmp_path):
    torch.cuda.init()
    with torch.cuda.device(1), closing(Saver(tmp_path, **FIXED)) as saver:
        seen = []
        saver.start(lambda: seen.append(torch.cuda.current_device()))
        saver.wait()
    assert seen == [1]


def explode():
    raise UserError("a mishap")


@pytest.mark.parametrize(("step", "end"), [(4, terminate), (5, explode)])
def test_run_ends_when_its_checkpoint_is_written(fit, tmp_path, monkeypatch, opened, step, end):
    """The checkpoint of step 4 is held back until the run has ended training."""

    def end_later():
        threading.Timer(0.3, opened.set).start()
        end()

    at_step(monkeypatch, step, end_later)
    with (
        nullcontext()
        if end is terminate
        else pytest.raises(UserError, match=r"^a mishap; the last good .*step_00000004")
    ):
        fit()
    [saved] = checkpoint.steps_on_disk(tmp_path / "run" / "checkpoints")
    assert checkpoint.load(saved).step == 4
