"""Spikes of the loss: the run goes back, and its batches since then are as if they never were."""

import copy
import re

import pytest
import torch

from fastgpt.cli import configure
from fastgpt.errors import UserError
from fastgpt.guards import spikes
from fastgpt.train.build import Run, build
from fastgpt.train.plan import resolve
from fastgpt.train.trainer import Trainer, train
from tests.guards.test_skips import poison
from tests.runs import finish, outcome, series, torchrun

FLAGS = (
    "--train.spike-z 8 --steps 30 --eval-every 0 --optim.kind adamw --optim.schedule constant"
    " --optim.warmup-steps 0 --optim.lr 1e-3"
)
SPIKES = (18, 26)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Compares with 6 steps at least, and keeps a state every 5 steps."""
    monkeypatch.setattr(spikes, "LEAST", 6)
    monkeypatch.setattr(spikes, "EVERY", 5)


def test_losses_are_those_of_a_loop_by_hand_that_goes_back(tiny):
    plain = "--optim.grad-clip 0 --optim.weight-decay 0 --optim.beta2 0.95"
    said, batches = [], []
    run = build(resolve(configure(tiny(FLAGS, plain))), said.append)
    said.clear()
    read = run.loader.next
    run.loader.next = lambda: batches.append(read()) or batches[-1]
    by_hand = copy.deepcopy(run.model)
    poison(run, SPIKES, 30.0)
    found = []
    for _ in range(30):
        train(run, run.step + 1)
        found.append(float(run.loss))
    run.loader.close()
    optimizer = torch.optim.AdamW(by_hand.parameters(), 1e-3, (0.8, 0.95), weight_decay=0.0)
    expected, kept = [], {}
    for step, (x, y) in enumerate(batches, start=1):
        optimizer.zero_grad()
        loss = by_hand(x, y)
        expected.append(float(loss.detach()) * (30 if step in SPIKES else 1))
        if step in SPIKES:
            model, moments = kept[(step - 1) // 5 * 5]
            by_hand.load_state_dict(model)
            optimizer.load_state_dict(copy.deepcopy(moments))
            continue
        loss.backward()
        optimizer.step()
        kept[step] = copy.deepcopy((by_hand.state_dict(), optimizer.state_dict()))
    assert found == pytest.approx(expected, rel=1e-5)
    assert run.spikes is not None
    assert run.spikes.total == 2
    assert len(said) == 2
    words = r"^step 18: the training loss is .*, over .* go back to those of step 15$"
    assert re.search(words, said[0])


def poisoned(monkeypatch, at):
    """Makes the losses of the given steps spikes, in every run."""
    init = Run.__init__

    def built(self, *args, **kwargs):
        init(self, *args, **kwargs)
        poison(self, at, 30.0)

    monkeypatch.setattr(Run, "__init__", built)


def test_resumed_run_goes_back_to_the_same_state(fit, tmp_path, monkeypatch):
    poisoned(monkeypatch, (19, 24))
    unbroken = fit(FLAGS, "--save-every 17", f"--run-dir {tmp_path / 'unbroken'}")
    run = fit(FLAGS, "--steps 17")
    fit(FLAGS, "--resume auto")
    (records, weights), (expected, wanted) = map(outcome, (run, unbroken))
    assert weights == wanted
    assert [r for r in records if "train_loss" in r] == [r for r in expected if "train_loss" in r]
    assert max(series(unbroken, "rollbacks").values()) == 2


def test_spikes_that_do_not_end_stop_the_run(tiny, monkeypatch):
    poisoned(monkeypatch, range(12, 30))
    said = (
        r"^step 15: the training loss is .*, for the 4th time since step 10: going back there does"
        r" not help \(--train.spike-z\); .*to resume"
    )
    with pytest.raises(UserError, match=said):
        Trainer(configure(tiny(FLAGS))).fit()


TWO_RANKS = """
import pytest, train
from fastgpt.guards import spikes
from tests.guards.test_spikes import poisoned
spikes.LEAST, spikes.EVERY = 6, 5
poisoned(pytest.MonkeyPatch(), (18, 26))
train.main()
"""


def test_ranks_that_share_weights_go_back_together(fit, tiny, tmp_path, monkeypatch):
    (tmp_path / "spike.py").write_text(TWO_RANKS)
    there = tmp_path / "two"
    flags = tiny(FLAGS, f"--parallel.kind fsdp --run-dir {there}")
    process = torchrun(2, str(tmp_path / "spike.py"), *flags, forks=True)
    poisoned(monkeypatch, SPIKES)
    run = fit(FLAGS)
    finish(process)
    for name in ("train_loss", "rollbacks"):
        assert series(there, name) == pytest.approx(series(run, name), rel=1e-5)


def test_fp16_is_refused(tiny):
    with pytest.raises(UserError, match=r"--train.spike-z is 8.*: expected 0 with --train.preci"):
        configure(tiny("--train.spike-z 8 --train.precision fp16"))
