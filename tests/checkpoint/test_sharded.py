"""Checkpoints that several ranks read and write."""

import errno
import json
import os
from unittest import mock

import pytest

from fastgpt.checkpoint import checkpoint, tensors
from fastgpt.cli import configure
from fastgpt.errors import UserError
from fastgpt.parallel.distributed import World
from fastgpt.train.trainer import Trainer
from tests.runs import outcome, series


@pytest.fixture
def saved(fit):
    """Folder of a checkpoint."""
    flags = "--steps 2 --eval-every 0 --train.sample-tokens 0"
    return fit(flags) / "checkpoints" / "step_00000002"


def test_ranks_of_a_machine_share_the_checksums(saved):
    names = list(json.loads((saved / "checkpoint.json").read_text())["sha256"])
    rank = names.index("tokenizer.json") % 2
    (saved / "tokenizer.json").write_text("damage")
    with pytest.raises(UserError, match=r"is damaged: tokenizer\.json"):
        checkpoint.load(saved, world=World(local_rank=rank, local_size=2))
    checkpoint.load(saved, world=World(local_rank=1 - rank, local_size=2))


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (("step_00000009", None), "the ranks see different checkpoints: step_00000002, step_0000"),
        (("step_00000002", "its disk fails"), "^its disk fails$"),
    ],
)
def test_ranks_load_the_same_checkpoint_or_none(told, said, saved, monkeypatch):
    monkeypatch.setattr(World, "all_gather_object", lambda _, own: [own, told])
    with pytest.raises(UserError, match=said):
        checkpoint.load(saved)


def test_files_of_version_0_2_are_refused(saved):
    record = json.loads((saved / "checkpoint.json").read_text())
    record["sha256"]["state.json"] = ""
    (saved / "checkpoint.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"files of each rank, as version 0\.2 wrote them"):
        checkpoint.load(saved)


def test_resumed_runs_have_the_same_bits_on_the_same_ranks(tiny, tmp_path, ranks):
    flags = "--parallel.kind fsdp --optim.schedule constant --model.dropout 0.1"
    places = "--model.dropout-places embedding residual feed_forward"
    for name, more in {"fsdp": "", "tp": f"--parallel.tp 2 {places}"}.items():
        run, unbroken = tmp_path / name, tmp_path / f"{name}-unbroken"
        broken = f"--run-dir {run}"
        ranks.train(
            tiny(flags, more, f"--run-dir {unbroken}"),
            tiny(flags, more, broken, "--steps 4"),
            tiny(flags, more, broken, "--resume auto"),
        )
        assert outcome(run) == outcome(unbroken)
        saved = checkpoint.steps_on_disk(run / "checkpoints")
        assert [path.name for path in saved] == ["step_00000004", "step_00000008"]
        assert {*checkpoint.WEIGHT_FILES} <= {path.name for path in saved[1].iterdir()}


def train_on_a_full_disk(argv):
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with (
        mock.patch.object(tensors, "write", side_effect=error),
        pytest.raises(UserError, match=r"no space left .*: the checkpoint of step 4 was not saved"),
    ):
        Trainer(configure(argv)).fit()


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_all_ranks_leave_where_one_cannot_save(tiny, tmp_path, kind, ranks):
    ranks(train_on_a_full_disk, tiny(f"--parallel.kind {kind} --steps 100000"))
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []
    assert max(series(tmp_path / "run", "val_loss")) == 4
