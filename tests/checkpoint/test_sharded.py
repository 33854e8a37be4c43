"""Checkpoints that several ranks read and write."""

import json

import pytest

from fastgpt.checkpoint import checkpoint
from fastgpt.errors import UserError
from fastgpt.parallel.distributed import World
from tests.runs import finish, outcome, series, torchrun, torchrun_in_turn


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


def test_resumed_runs_have_the_same_bits_on_the_same_ranks(tiny, tmp_path):
    flags = "--parallel.kind fsdp --optim.schedule constant --model.dropout 0.1"
    runs = []
    places = "--model.dropout-places embedding residual feed_forward"
    for name, more in {"fsdp": "", "tp": f"--parallel.tp 2 {places}"}.items():
        broken = f"--run-dir {tmp_path / name}"
        runs += [
            tiny(flags, more, f"--run-dir {tmp_path / name}-unbroken"),
            tiny(flags, more, broken, "--steps 4"), tiny(flags, more, broken, "--resume auto"),
        ]  # fmt: skip
    finish(torchrun_in_turn(2, tmp_path / "jobs", runs))
    for name in ("fsdp", "tp"):
        run = tmp_path / name
        assert outcome(run) == outcome(tmp_path / f"{name}-unbroken")
        saved = checkpoint.steps_on_disk(run / "checkpoints")
        assert [path.name for path in saved] == ["step_00000004", "step_00000008"]
        assert {*checkpoint.WEIGHT_FILES} <= {path.name for path in saved[1].iterdir()}


def test_full_disk_ends_all_ranks_with_one_line(tiny, tmp_path):
    (tmp_path / "failing.py").write_text(
        "import errno, train\n"
        "from fastgpt.checkpoint import tensors\n"
        "def full(*_):\n"
        "    raise OSError(errno.ENOSPC, 'No space left on device')\n"
        "tensors.write = full\n"
        "train.main()\n"
    )
    flags = tiny("--parallel.kind fsdp --steps 100000 --eval-every 4")
    process = torchrun(2, str(tmp_path / "failing.py"), *flags, forks=True)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    said = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(said) == 1, err
    assert "no space left on the disk of" in said[0]
    assert "the checkpoint of step 4 was not saved" in said[0]
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []
    assert max(series(tmp_path / "run", "val_loss")) == 4
