"""Own datasets of torch.utils.data through the trainer: its order, ranks, masks and resuming."""

import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from torch.utils.data import TensorDataset

import fastgpt
from fastgpt.cli import configure
from fastgpt.data.dataset import open_own
from fastgpt.errors import UserError
from fastgpt.model.build import build_model
from fastgpt.ops.tables import select
from tests.processes import ROOT
from tests.runs import assert_same_up_to_rounding, finish, outcome, series, torchrun

FLAGS = (
    "--optim.kind adamw --optim.lr 1e-2 --optim.schedule constant --optim.warmup-steps 0"
    " --optim.grad-clip 0 --optim.weight-decay 0 --train.micro-batch 2 --steps 6"
)
SCRIPT = """
import sys
from fastgpt.cli import configure
from fastgpt.faults.failure import abort_all_ranks
from fastgpt.train.trainer import Trainer
from tests.train.test_own_data import own
with abort_all_ranks():
    Trainer(configure(sys.argv[1:]), own()).fit()
"""


def own(vocab_size=50, train=20, **options):
    """Random items whose numbers of targets differ, from 1 to 16."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randint(50, (train + 5, 16), generator=generator) for _ in "xy")
    y[torch.rand(y.shape, generator=generator) < torch.linspace(0, 0.9, 16)] = -100
    y[:, 0] = 3
    sets = (TensorDataset(x[:train], y[:train]), TensorDataset(x[train:], y[train:]))
    return fastgpt.Data(train=sets[0], val=sets[1], vocab_size=vocab_size, **options)


def trained(argv, data=None):
    config = configure(argv)
    fastgpt.Trainer(config, data or own()).fit()
    return config.run_dir


def test_losses_are_those_of_a_loop_by_hand(tiny):
    """8 items a step in 4 micro-batches; the mean is over the targets of all 8."""
    run = trained(tiny(FLAGS))
    config, data = configure(tiny(FLAGS)), own()
    [order] = open_own(data, 16, config.data).orders(16, config.seed)
    torch.manual_seed(config.seed)
    plain = select(config.ops, "cpu")
    model = build_model(replace(config.model, vocab_size=50), plain)
    betas = (config.optim.beta1, config.optim.beta2)
    adamw = torch.optim.AdamW(model.parameters(), 1e-2, betas, weight_decay=0)
    expected, place = {}, (0, 0)
    for step in range(1, 7):
        numbers, *place = order.take(*place, 8)
        x, y = (tensor[numbers] for tensor in data.train.tensors)
        loss = F.cross_entropy(model(x)[..., :50].flatten(0, 1), y.flatten())
        adamw.zero_grad()
        loss.backward()
        adamw.step()
        expected[step] = loss.item()
    assert series(run, "train_loss") == pytest.approx(expected, rel=1e-5)
    x, y = data.val.tensors
    loss = F.cross_entropy(model.eval()(x)[..., :50].flatten(0, 1), y.flatten()).item()
    assert series(run, "val_loss")[6] == pytest.approx(loss, rel=1e-4)
    _, tokenizer = fastgpt.load(run)
    assert tokenizer.decode(tokenizer.encode("7 49")) == "7 49"


def test_ranks_share_the_items_and_a_run_goes_on(tiny, tmp_path):
    whole = trained([*tiny(FLAGS), "--run-dir", str(tmp_path / "whole")])
    script = tmp_path / "own.py"
    script.write_text(SCRIPT)
    two = [*tiny(FLAGS), "--run-dir", str(tmp_path / "two")]
    finish(torchrun(2, str(script), *two, forks=True))
    assert_same_up_to_rounding(tmp_path / "two", whole)
    trained([*tiny(FLAGS), "--steps", "3"])
    run = trained([*tiny(FLAGS), "--resume", "auto"])
    assert outcome(run)[1] == outcome(whole)[1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: replace(d, vocab_size=40), r"item 0: tokens have the id 4\d: expected 0 to 39"),
        (lambda d: replace(d, vocab_size=None), "vocab_size is missing: expected it, or a token"),
        (lambda d: replace(d, vocab_size=-1), "vocab_size is -1: expected 1 or more"),
        (lambda d: replace(d, train=TensorDataset(*(t[:, :9] for t in d.train.tensors))),
         r"\(train\), item 0: tokens are \(9,\) torch.int64: expected \(16,\) torch.int64"),
        (lambda d: replace(d, val=[(torch.zeros(16), 1)]), r"tokens are \(16,\) torch.float32"),
        (lambda d: replace(d, val=[torch.zeros(16)]), r"item 0 is Tensor: expected a pair"),
        (lambda d: replace(d, val=[]), r"own data \(val\) is empty: expected at least one item"),
        (lambda d: replace(d, val=[(torch.zeros(16).long(), torch.full((16,), -100))]),
         r"\(val\), item 0: no target counts, all are -100"),
    ],
)  # fmt: skip
def test_bad_items_are_named(change, said, tiny):
    with pytest.raises(UserError, match=said):
        fastgpt.Trainer(configure(tiny(FLAGS)), change(own()))


def test_random_batches_are_refused(tiny):
    with pytest.raises(UserError, match=r"--data.sampling is lecture: own data"):
        fastgpt.Trainer(configure(tiny("--data.sampling lecture")), own())


def test_the_pages_example_runs(tmp_path, monkeypatch, one_thread):
    monkeypatch.setattr("fastgpt.device.device.measured_peak", lambda *_: 1e11)
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "finetuning.md").read_text()
    names = {}
    exec(re.search(r"```python\n(.*?)```", page, re.S)[1], names)
    assert names["trainer"].run.step == 2
