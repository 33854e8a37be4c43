"""Nothing that is read runs code, leaves its folder, or is written for everyone."""

import io
import os
import re
import sys

import pytest
import torch

from fastgpt import cli
from fastgpt.checkpoint import checkpoint
from fastgpt.checkpoint.tensors import unpickle
from fastgpt.errors import UserError
from tests.faults.hostile import resealed
from tests.faults.mutations import Evil
from tests.processes import ROOT

DANGER = re.compile(
    r"(?<![\w.])(eval|exec)\(|\b(pickle|dill|marshal|shelve|joblib)\.(?!dump)\w+\("
    r"|\b(import|from) yaml\b|\bYAML\((?!typ=.safe.)"
    r"|torch\.load\((?!.*weights_only=True)|allow_pickle=True|trust_remote_code=True"
)
"""A call that could run code from a file; of torch.load also one that goes on in the next line."""


def test_no_file_is_loaded_in_a_way_that_runs_code():
    paths = [p for part in ("fastgpt", "kernels", "bench") for p in (ROOT / part).rglob("*.py")]
    assert len(paths) > 100
    assert [p for p in (ROOT / "train.py", *paths) if DANGER.search(p.read_text())] == []


def test_text_is_printed_through_the_filter_alone():
    """Generated text and names of files may hold escape sequences for the terminal."""
    writes = re.compile(r"(?<![\w.])print\(|sys\.std(out|err)\.write\(")
    found = {p.name for p in (ROOT / "fastgpt").rglob("*.py") if writes.search(p.read_text())}
    # choose.py prints no foreign text
    assert found == {"terminal.py", "choose.py"}


@pytest.mark.parametrize(
    "source",
    ["torch.load(p)", "torch.load(p, weights_only=False)", "pickle.load(f)", "= eval(x)", "exec(x)",
     "import yaml", 'YAML(typ="unsafe")', "np.load(p, allow_pickle=True)",
     "f(trust_remote_code=True)"],
)  # fmt: skip
def test_dangerous_calls_are_found(source):
    assert DANGER.search(source)
    safe = "torch.load(p, weights_only=True); model.eval(); np.load(p); YAML(typ='safe')"
    assert not DANGER.search(safe)


def test_a_pickle_that_would_run_code_is_refused(tmp_path):
    path = tmp_path / "state.pt"
    torch.save({"optimizers": [Evil()]}, path)
    with pytest.raises(UserError, match=r"state\.pt cannot be read: UnpicklingError"):
        unpickle(path)
    with pytest.raises(SystemExit, match="it ran"):
        torch.load(path, weights_only=False)


@pytest.mark.parametrize(("mask", "refused"), [(0, 0o022), (0o004, 0o002)])
def test_nothing_that_training_writes_is_writable_for_everyone(
    mask, refused, tiny, tmp_path, monkeypatch
):
    monkeypatch.setattr(sys, "argv", ["train.py", *tiny("--steps 1 --eval-every 0")])
    before = os.umask(mask)
    try:
        cli.main()
    finally:
        os.umask(before)
    run = tmp_path / "run"
    found = [path for path in (run, *run.rglob("*")) if path.stat().st_mode & refused]
    assert found == []
    assert (run / "metrics.jsonl").is_file()


def moment(state):
    return state["optimizers"]["optimizers"][0]["state"][0]


STATES = {
    "no optimizers": lambda state: state.pop("optimizers"),
    "no corpus": lambda state: state.pop("corpus"),
    "no loader": lambda state: state.update(loader=3),
    "a word for a count": lambda state: state["loader"].update(sample=["x"]),
    "before the beginning": lambda state: state["loader"].update(index=[-1]),
    "another shape": lambda state: moment(state).update(
        {name: torch.zeros(3, 3) for name, x in moment(state).items() if x.dim()}
    ),
}


def test_a_state_that_does_not_fit_is_refused_even_with_a_right_checksum(fit):
    [path] = checkpoint.steps_on_disk(fit("--steps 1 --eval-every 0") / "checkpoints")
    record, data = (path / "checkpoint.json").read_bytes(), (path / "state.pt").read_bytes()
    for name, change in STATES.items():
        state = torch.load(io.BytesIO(data), weights_only=True)
        change(state)
        torch.save(state, path / "state.pt")
        new = resealed(record, data, (path / "state.pt").read_bytes())
        (path / "checkpoint.json").write_bytes(new)
        with pytest.raises(UserError, match=r"does not fit this run|loader state"):
            pytest.fail(f"{name}: {fit(f'--steps 2 --resume {path}')}")
