"""Optimizer steps whose loss or gradients are not finite are left out, as if they never were."""

from unittest import mock

import pytest
import torch
from torch.utils._pytree import tree_leaves

from fastgpt.cli import configure
from fastgpt.errors import UserError
from fastgpt.model.gpt import GPT
from fastgpt.train.build import build
from fastgpt.train.plan import resolve
from fastgpt.train.trainer import train
from tests.processes import train_in_turn
from tests.runs import series

FLAGS = "--train.skip-nonfinite 2 --eval-every 0"


def poison(run, at, value):
    """Makes the loss of the given steps infinite or NaN, from a gradient on."""
    forward = run.forward
    run.forward = lambda x, y: forward(x, y) * (value if run.step + 1 in at else 1.0)


@pytest.mark.parametrize(("kind", "value"), [("adamw", torch.nan), ("muon", torch.inf)])
def test_a_skipped_step_changes_nothing_bit_for_bit(tiny, kind, value):
    skipping, without = (
        build(resolve(configure(tiny(FLAGS, f"--optim.kind {kind}")))) for _ in range(2)
    )
    poison(skipping, (1, 4), value)
    for step in range(1, 7):
        train(skipping, step)
        if step in (1, 4):  # its batch is left out
            without.loader.next()
            without.step += 1
        else:
            train(without, step)
            assert skipping.finite_loss() == without.finite_loss()
        trees = [[run.model.state_dict()] for run in (skipping, without)]
        if step > 1:  # before, the one without has no moments, and the other zeros
            for tree, run in zip(trees, (skipping, without)):
                tree.append(run.snapshot()[1]["optimizers"])
        for ours, wanted in zip(*map(tree_leaves, trees), strict=True):
            if isinstance(ours, torch.Tensor):
                ours, wanted = (x[None].contiguous().view(torch.uint8) for x in (ours, wanted))
                assert torch.equal(ours, wanted)
    assert skipping.finite.skipped == 2
    for run in (skipping, without):
        run.loader.close()


def train_with_nan(argv, wrong):
    """Trains; on the rank `wrong`, or without ranks, the loss of step 3 is NaN."""
    steps, forward = [], GPT.forward
    here = not torch.distributed.is_initialized() or torch.distributed.get_rank() == wrong

    def forward_to_nan(self, *args, **kwargs):
        loss = forward(self, *args, **kwargs)
        steps.extend([1] * (self.training and torch.is_grad_enabled()))
        return loss * torch.nan if here and self.training and len(steps) == 3 else loss

    with mock.patch.object(GPT, "forward", forward_to_nan):
        train_in_turn([argv])


@pytest.mark.cpu  # counts forwards; CUDA tries some before
@pytest.mark.parametrize(("optimizer", "kind"), [("muon", "ddp"), ("adamw", "fsdp")])
def test_ranks_skip_the_step_together(optimizer, kind, ranks, tiny, tmp_path):
    flags = tiny(FLAGS, f"--optim.kind {optimizer}")
    one, two = tmp_path / "one", tmp_path / "run"
    ranks(train_with_nan, [*flags, "--parallel.kind", kind], 1)
    train_with_nan([*flags, "--run-dir", str(one)], 0)
    for run in (one, two):
        assert series(run, "skipped_steps") == {step: int(step == 3) for step in range(1, 9)}
    for key in ("train_loss", "val_loss"):
        ours, wanted = (series(run, key) for run in (two, one))
        if key == "train_loss":
            assert ours.pop(3) is wanted.pop(3) is None
        assert ours == pytest.approx(wanted, rel=2e-5)


def test_after_as_many_in_a_row_the_run_stops_and_names_the_first(tiny):
    run = build(resolve(configure(tiny(FLAGS))))
    poison(run, (2, 4, 5), torch.nan)
    for _ in range(4):
        train(run, run.step + 1)
        run.finite_loss()
    train(run, run.step + 1)
    train(run, run.step + 1)  # a finite one again: the next log line finds out
    said = r"^step 4: not finite for 2 steps in a row or longer; at step 6 .*: the gradient of \S+$"
    with pytest.raises(UserError, match=said):
        run.finite_loss()
    run.loader.close()


@pytest.mark.parametrize("given", ["skip-nonfinite", "spike-z"])
def test_fp16_has_skips_of_its_own(tiny, given):
    with pytest.raises(UserError, match=rf"--train\.{given} is 2.*: expected 0 "):
        configure(tiny(f"--train.precision fp16 --train.{given} 2"))
