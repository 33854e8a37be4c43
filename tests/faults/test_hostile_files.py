"""Files from elsewhere: a damaged one ends in one line, and none runs code."""

import io
import json
import os
import re

import pytest
import torch

from fastgpt import cli
from fastgpt.checkpoint import checkpoint
from fastgpt.checkpoint.tensors import unpickle
from fastgpt.data.tokenizers import Tokenizer
from fastgpt.errors import UserError
from fastgpt.sampling.chat import Template
from tests.data.sets import tokenizer_of
from tests.faults.hostile import PIECES, TALK, Evil, resealed
from tests.processes import ROOT, script


def test_no_damaged_file_ends_in_a_traceback_or_takes_much_memory_or_time(tmp_path):
    """The first cases; `python -m tests.faults.hostile` has 10,000."""
    out = tmp_path / "record.json"
    ended = script("-m", "tests.faults.hostile", "--cases", 120, "--out", out)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    said = {said for *_, said, _ in json.loads(out.read_text())["counts"]}
    assert said == {"refused", "equal", "other content"}


REFUSED = ("Unexpected end of template", "Range too big", "no", "maximum recursion", "unsafe")
"""A word of the error about each of the first pieces."""


@pytest.mark.parametrize(("piece", "said"), [*zip(PIECES, REFUSED)])
def test_a_template_that_fails_is_one_line(piece, said):
    with pytest.raises(UserError, match=rf"^the chat template [^\n]*: [^\n]*{said}[^\n]*$"):
        Template(piece).render(TALK)


def test_a_tokenizers_panic_over_a_text_is_one_line():
    step = {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""}
    hostile = json.loads(tokenizer_of("bpe").to_json()) | {"normalizer": step}
    with pytest.raises(UserError, match=r"^the bpe tokenizer cannot encode a text: [^\n]*$"):
        Tokenizer(json.dumps(hostile)).encode("a" * 40 + "!")


def test_no_file_is_loaded_in_a_way_that_runs_code():
    danger = re.compile(
        r"(?<![\w.])(eval|exec)\(|\b(pickle|dill|marshal|shelve|joblib)\.(?!dump)\w+\("
        r"|\b(import|from) yaml\b|\bYAML\((?!typ=.safe.)"
        r"|torch\.load\((?!.*weights_only=True)|allow_pickle=True|trust_remote_code=True"
    )
    paths = [p for part in ("fastgpt", "kernels", "bench") for p in (ROOT / part).rglob("*.py")]
    assert len(paths) > 100
    assert [p for p in (ROOT / "train.py", *paths) if danger.search(p.read_text())] == []


def test_text_is_printed_through_the_filter_alone():
    """Generated text and names of files may hold escape sequences for the terminal."""
    writes = re.compile(r"(?<![\w.])print\(|sys\.std(out|err)\.write\(")
    found = {p.name for p in (ROOT / "fastgpt").rglob("*.py") if writes.search(p.read_text())}
    # choose.py prints no foreign text
    assert found == {"terminal.py", "choose.py"}


def test_a_pickle_that_would_run_code_is_refused(tmp_path):
    path = tmp_path / "state.pt"
    torch.save({"optimizers": [Evil()]}, path)
    with pytest.raises(UserError, match=r"state\.pt cannot be read: UnpicklingError"):
        unpickle(path)
    with pytest.raises(SystemExit, match="it ran"):
        torch.load(path, weights_only=False)


@pytest.mark.parametrize(("mask", "refused"), [(0, 0o022), (0o004, 0o002)])
def test_nothing_that_training_writes_is_writable_for_everyone(mask, refused, tiny, tmp_path):
    before = os.umask(mask)
    try:
        cli.main(tiny("--steps 1 --eval-every 0"))
    finally:
        os.umask(before)
    run = tmp_path / "run"
    assert (run / "metrics.jsonl").is_file()
    assert [path for path in (run, *run.rglob("*")) if path.stat().st_mode & refused] == []


def moment(state):
    return state["optimizers"]["optimizers"][0]["state"][0]


CHANGES = {
    "no optimizers": lambda state: state.pop("optimizers"),
    "no loader": lambda state: state.update(loader=3),
    "a word for a count": lambda state: state["loader"].update(sample=["x"]),
    "before the beginning": lambda state: state["loader"].update(index=[-1]),
    "another shape": lambda state: moment(state).update(exp_avg=torch.zeros(3, 3)),
}


def test_a_state_that_does_not_fit_is_refused_even_with_a_right_checksum(fit):
    [path] = checkpoint.steps_on_disk(fit("--steps 1 --eval-every 0") / "checkpoints")
    record, data = (path / "checkpoint.json").read_bytes(), (path / "state.pt").read_bytes()
    for name, change in CHANGES.items():
        state = torch.load(io.BytesIO(data), weights_only=True)
        change(state)
        torch.save(state, path / "state.pt")
        new = resealed(record, data, (path / "state.pt").read_bytes())
        (path / "checkpoint.json").write_bytes(new)
        with pytest.raises(UserError, match=r"does not fit this run|loader state"):
            pytest.fail(f"{name}: {fit(f'--steps 2 --resume {path}')}")
