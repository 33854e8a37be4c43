"""Own datasets of torch.utils.data through the trainer: its order, ranks, masks and resuming."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from torch.utils.data import TensorDataset

import fastgpt
from fastgpt.cli import configure
from fastgpt.config.config import DataConfig
from fastgpt.data.dataset import open_own
from fastgpt.errors import UserError
from fastgpt.model.build import build_model
from fastgpt.ops.tables import select
from tests.runs import assert_same_up_to_rounding, outcome, series

FLAGS = (
    "--optim.kind adamw --optim.lr 1e-2 --optim.schedule constant --optim.warmup-steps 0"
    " --optim.grad-clip 0 --optim.weight-decay 0 --train.micro-batch 2 --steps 6"
)


def own():
    """Random items whose numbers of targets differ, from 1 to 16."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randint(50, (25, 16), generator=generator) for _ in "xy")
    y[torch.rand(y.shape, generator=generator) < torch.linspace(0, 0.9, 16)] = -100
    y[:, 0] = 3
    train, val = TensorDataset(x[:20], y[:20]), TensorDataset(x[20:], y[20:])
    return fastgpt.Data(train=train, val=val, vocab_size=50)


def trained(argv):
    config = configure(argv)
    fastgpt.Trainer(config, own()).fit()
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


def test_ranks_share_the_items_and_a_run_goes_on(tiny, tmp_path, ranks):
    whole = trained([*tiny(FLAGS), "--run-dir", str(tmp_path / "whole")])
    [two, _] = ranks(trained, [*tiny(FLAGS), "--run-dir", str(tmp_path / "two")])
    assert_same_up_to_rounding(two, whole)
    trained([*tiny(FLAGS), "--steps", "3"])
    run = trained([*tiny(FLAGS), "--resume", "auto"])
    assert outcome(run)[1] == outcome(whole)[1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"vocab_size": 40}, r"\(train\), item 0: tokens have the id 4\d: expected 0 to 39"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"train": [(torch.zeros(9).long(), 1)]}, r"\(train\), item 0: tokens are \(9,\)"),
        ({"val": [torch.zeros(16)]}, "item 0 is Tensor: expected a pair"),
        ({"val": []}, r"\(val\) is empty"),
        ({"val": [(torch.zeros(16).long(), torch.full((16,), -100))]}, r"\(val\), .* no target"),
    ],
)
def test_bad_items_are_named_and_random_batches_refused(change, said):
    with pytest.raises(UserError, match=said):
        open_own(replace(own(), **change), 16, DataConfig())
    with pytest.raises(UserError, match="lecture"):
        open_own(own(), 16, DataConfig(sampling="lecture"))
