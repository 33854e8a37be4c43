"""Checkpoints of ranks that share weights, those of version 0.2 too, are read by any number."""

import json

import pytest
import torch
from safetensors.torch import save_file

import fastgpt
from fastgpt.checkpoint import checkpoint
from fastgpt.checkpoint.sharded import STATE
from fastgpt.cli import parse
from fastgpt.errors import UserError
from fastgpt.files import sha256_of
from fastgpt.parallel.distributed import World
from fastgpt.train.engine import Engine
from tests.runs import finish, outcome, series, torchrun, torchrun_in_turn


def written_by_ranks(path, ranks, padded=300):
    """Rewrites a checkpoint as so many ranks would, by hand: the last one has what is left over."""
    whole = checkpoint.load(path)
    parts = {f"model.{name}": x for name, x in whole.weights.items()}
    rows = {"wte.weight": len(parts["model.wte.weight"])}
    missing = torch.zeros(padded - rows["wte.weight"], parts["model.wte.weight"].shape[1])
    parts["model.wte.weight"] = torch.cat((parts["model.wte.weight"], missing))

    def named(tree, place):
        if isinstance(tree, torch.Tensor):
            parts[place] = tree
            return {"tensor": place}
        if isinstance(tree, dict):
            return {key: named(x, f"{place}/{key}") for key, x in tree.items()}
        if isinstance(tree, list):
            return [named(x, f"{place}/{i}") for i, x in enumerate(tree)]
        return tree

    (path / STATE).write_text(json.dumps(named(whole.state, "") | {"rows": rows}))
    names = [STATE, "config.json", "tokenizer.json"]
    for rank in range(ranks):
        own, offsets = {}, {}
        for name, x in parts.items():
            first = len(x) * rank // (ranks + 1) if x.dim() else 0
            last = len(x) * (rank + 1) // (ranks + 1) if x.dim() and rank < ranks - 1 else None
            if x.dim() or rank == 0:
                own[name] = x[first:last].contiguous() if x.dim() else x
                offsets[name] = {"saved_offsets": [first] + [0] * (x.dim() - 1) if x.dim() else []}
        names.append(f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors")
        save_file(own, path / names[-1], {"DCP_SHARDING_INFO": json.dumps(offsets)})
    for name in checkpoint.WEIGHT_FILES:
        (path / name).unlink()
    record = {"format_version": 2, "step": whole.step}
    record["sha256"] = {name: sha256_of(path / name) for name in names}
    (path / "checkpoint.json").write_text(json.dumps(record))
    return whole


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_parts_of_three_ranks_are_a_run_for_one(kind, fit, tmp_path):
    flags = f"--optim.kind {kind} --optim.schedule constant"
    unbroken = fit(flags, f"--run-dir {tmp_path / 'unbroken'}")
    run = fit(flags, "--steps 4")
    path = run / "checkpoints" / "step_00000004"
    before, _ = fastgpt.load(path)
    whole = written_by_ranks(path, 3)
    after, tokenizer = fastgpt.load(path)
    assert tokenizer is not None
    for name, weight in before.state_dict().items():
        assert torch.equal(after.state_dict()[name], weight), name
    found = checkpoint.load(path)
    assert [found.step, list(found.weights)] == [4, list(whole.weights)]
    fit(flags, "--resume auto")
    assert outcome(run) == outcome(unbroken)


@pytest.fixture
def parts(fit):
    """Folder of a checkpoint in the files of two ranks."""
    path = fit("--steps 2 --eval-every 0 --train.sample-tokens 0") / "checkpoints" / "step_00000002"
    written_by_ranks(path, 2)
    return path


FIRST = "shard-00001-model-00001-of-00001.safetensors"


def test_ranks_of_a_machine_share_the_checksums(parts):
    names = list(json.loads((parts / "checkpoint.json").read_text())["sha256"])
    with (parts / names[1]).open("r+b") as file:
        file.write(b"damage")
    with pytest.raises(UserError, match=f"is damaged: {names[1]}"):
        checkpoint.load(parts, world=World(local_rank=1, local_size=2))
    checkpoint.load(parts, world=World(local_rank=0, local_size=2))


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (("step_00000009", None), "the ranks see different checkpoints: step_00000002, step_0000"),
        (("step_00000002", "its disk fails"), "^its disk fails$"),
    ],
)
def test_ranks_load_the_same_checkpoint_or_none(told, said, parts, monkeypatch):
    monkeypatch.setattr(World, "all_gather_object", lambda _, own: [own, told])
    with pytest.raises(UserError, match=said):
        checkpoint.load(parts)


def test_file_that_no_rank_wrote_is_left_out(parts):
    before = dict(checkpoint.load(parts).weights)
    (parts / "shard-00009.safetensors").write_bytes((parts / FIRST).read_bytes())
    after = checkpoint.load(parts).weights
    assert all(torch.equal(after[name], x) for name, x in before.items())


def test_rank_without_its_file_is_noticed(parts):
    record = json.loads((parts / "checkpoint.json").read_text())
    del record["sha256"][FIRST]
    (parts / FIRST).unlink()
    (parts / "checkpoint.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"\d+ of \d+ numbers of .* are there"):
        checkpoint.load(parts)


def test_parts_of_another_model_are_refused(parts, tiny):
    with pytest.raises(UserError, match=r"model.dim|do not fit|does not fit"):
        Engine(parse(tiny(f"--resume {parts} --model.dim 16")))


def test_resumed_runs_have_the_same_bits_on_the_same_ranks(tiny, tmp_path):
    flags = "--parallel.kind fsdp --optim.schedule constant --model.dropout 0.1"
    runs = []
    for name, more in {"fsdp": "", "tp": "--parallel.tp 2 --model.attention-dropout 0"}.items():
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
