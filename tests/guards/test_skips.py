"""Optimizer steps whose loss or gradients are not finite are left out, as if they never were."""

import pytest
import torch
from torch.utils._pytree import tree_leaves

from fastgpt.cli import configure
from fastgpt.config.config import TrainConfig
from fastgpt.errors import UserError
from fastgpt.model.gpt import GPT
from fastgpt.train.build import build
from fastgpt.train.plan import resolve
from fastgpt.train.trainer import train
from tests.runs import finish, series, torchrun

FLAGS = "--train.skip-nonfinite 2 --eval-every 0"


def poison(run, at, value):
    """Makes the loss of the given steps infinite or NaN, from a gradient on."""
    forward = run.forward
    run.forward = lambda x, y: forward(x, y) * (value if run.step + 1 in at else 1.0)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
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
        trees = [[e.model.state_dict()] for e in (skipping, without)]
        if step > 1:  # before, the one without has no moments, and the other zeros
            for tree, run in zip(trees, (skipping, without)):
                tree.append(run.snapshot()[1]["optimizers"])
        for ours, wanted in zip(*map(tree_leaves, trees), strict=True):
            if isinstance(ours, torch.Tensor):
                ours, wanted = (
                    x.contiguous().view(torch.uint8) for x in (ours[None], wanted[None])
                )
                assert torch.equal(ours, wanted)
    assert skipping.finite.skipped == 2
    for run in (skipping, without):
        run.loader.close()


ONE_RANK_IS_WRONG = """
import os, torch
import train
from fastgpt.model.gpt import GPT
from tests.guards.test_skips import wrong_at_step_3

GPT.forward = wrong_at_step_3(GPT.forward, int(os.environ["RANK"]) == 1)
train.main()
"""


def wrong_at_step_3(forward, wrong):
    """Returns the forward of a model whose loss at its third training step is NaN."""
    steps = []

    def forwards(self, *args, **kwargs):
        loss = forward(self, *args, **kwargs)
        if self.training and torch.is_grad_enabled():
            steps.append(1)
        return loss * torch.nan if wrong and self.training and len(steps) == 3 else loss

    return forwards


@pytest.mark.cpu  # counts forwards, of which CUDA tries some before
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param("--optim.kind muon", marks=pytest.mark.slow),
        "--optim.kind adamw --parallel.kind fsdp",
    ],
)
def test_ranks_skip_the_step_together(flags, fit, tiny, tmp_path, monkeypatch):
    (tmp_path / "wrong.py").write_text(ONE_RANK_IS_WRONG)
    optimizer = " ".join(flags.split()[:2])
    finish(torchrun(2, str(tmp_path / "wrong.py"), *tiny(FLAGS, flags), forks=True))
    monkeypatch.setattr(GPT, "forward", wrong_at_step_3(GPT.forward, True))
    one = fit(FLAGS, optimizer, f"--run-dir {tmp_path / 'one'}")
    for run in (one, tmp_path / "run"):
        assert series(run, "skipped_steps") == {step: int(step == 3) for step in range(1, 9)}
    for key in ("train_loss", "val_loss"):
        ours, wanted = (series(run, key) for run in (tmp_path / "run", one))
        if key == "train_loss":
            assert ours.pop(3) is wanted.pop(3) is None
        assert ours == pytest.approx(wanted, rel=2e-5)


def test_after_as_many_in_a_row_the_run_stops_and_names_the_first(tiny, capfd):
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


def test_fp16_skips_by_itself():
    with pytest.raises(UserError, match=r"--train.skip-nonfinite is 2: expected 0 with .* fp16"):
        TrainConfig(skip_nonfinite=2, precision="fp16")
