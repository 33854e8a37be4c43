"""Spikes of the loss: the run goes back, and its batches since then are as if they never were."""

import copy
import re
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from fastgpt.cli import configure
from fastgpt.errors import UserError
from fastgpt.guards import spikes
from fastgpt.train.build import Run, build
from fastgpt.train.plan import resolve
from fastgpt.train.trainer import train
from tests.guards.test_skips import poison
from tests.processes import train_in_turn
from tests.runs import outcome, series

FLAGS = (
    "--train.spike-z 8 --steps 30 --eval-every 0 --optim.kind adamw --optim.schedule constant"
    " --optim.warmup-steps 0 --optim.lr 1e-3"
)
SPIKES = (18, 26)


@contextmanager
def poisoned(at=()):
    """Makes the losses of these steps spikes; compares with 6 steps, and keeps a state every 5."""
    init = Run.__init__

    def built(self, *args, **kwargs):
        init(self, *args, **kwargs)
        poison(self, at, 30.0)

    with (
        mock.patch.multiple(spikes, LEAST=6, EVERY=5),
        mock.patch.object(Run, "__init__", built),
    ):
        yield


def train_poisoned(argv, at=SPIKES):
    with poisoned(at):
        train_in_turn([argv])


def test_losses_are_those_of_a_loop_by_hand_that_goes_back(tiny):
    plain = "--optim.grad-clip 0 --optim.weight-decay 0 --optim.beta2 0.95"
    said, batches, found = [], [], []
    with poisoned(SPIKES):
        run = build(resolve(configure(tiny(FLAGS, plain))), said.append)
        said.clear()
        read = run.loader.next
        run.loader.next = lambda: batches.append(read()) or batches[-1]
        by_hand = copy.deepcopy(run.model)
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
    assert run.spikes.total == len(said) == 2
    assert re.search(r"^step 18: the training loss is .* go back to those of step 15$", said[0])


def test_resumed_run_goes_back_to_the_same_state(tiny, tmp_path):
    unbroken, run = tmp_path / "unbroken", tmp_path / "run"
    for flags in (f"--save-every 17 --run-dir {unbroken}", "--steps 17", "--resume auto"):
        train_poisoned(tiny(FLAGS, flags), (19, 24))
    (records, weights), (expected, wanted) = map(outcome, (run, unbroken))
    assert weights == wanted
    assert [r for r in records if "train_loss" in r] == [r for r in expected if "train_loss" in r]
    assert max(series(unbroken, "rollbacks").values()) == 2


def test_spikes_that_do_not_end_stop_the_run(tiny):
    said = r"^step 15: the training loss is .*, for the 4th time since step 10: .*to resume"
    with pytest.raises(UserError, match=said):
        train_poisoned(tiny(FLAGS), range(12, 30))


def test_ranks_that_share_weights_go_back_together(ranks, tiny, tmp_path):
    one, two = tmp_path / "run", tmp_path / "two"
    ranks(train_poisoned, tiny(FLAGS, f"--parallel.kind fsdp --run-dir {two}"))
    train_poisoned(tiny(FLAGS))
    for name in ("train_loss", "rollbacks"):
        assert series(two, name) == pytest.approx(series(one, name), rel=1e-5)
    assert max(series(two, "rollbacks").values()) == 2
