"""Activations that are computed again: the same bits, and attention only once."""

import pytest
import torch

from fastgpt.config.model import ModelConfig
from fastgpt.errors import UserError
from fastgpt.kernels.runtime import LAUNCHES
from fastgpt.model.build import build_model
from tests.models import OPTIONS, TINY, build, on_cpu


def trained(recompute, chosen, options):
    """Returns the loss and all gradients of a model in training."""
    torch.manual_seed(0)
    model = build(chosen=chosen, dropout=0.2, **options).train()
    for block in model.h:
        block.recompute = recompute
    tokens = torch.randint(50, (2, 16))
    torch.manual_seed(1)
    loss = model(tokens, tokens.roll(-1, 1))
    loss.backward()
    return [loss, *(weight.grad for weight in model.parameters())]


@pytest.mark.parametrize(
    ("name", "kernels"),
    [("gpt2", False), ("post-norm", False), ("modern", False), ("gpt2", True), ("modern", True)],
)
def test_loss_and_gradients_have_the_same_bits(name, kernels):
    chosen = on_cpu(attention="triton", kernels="triton") if kernels else on_cpu()
    expected = trained("none", chosen, OPTIONS[name])
    for recompute, runs in (("selective", 1), ("full", 2)):
        LAUNCHES.clear()
        found = trained(recompute, chosen, OPTIONS[name])
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        if kernels:
            assert LAUNCHES["_attention_fwd_kernel"] == TINY.num_layers * runs


def test_steps_of_the_lecture_are_refused():
    config = ModelConfig(architecture="residual", activation="relu", vocab_size=50)
    with pytest.raises(UserError, match=r"--train.recompute is full"):
        build_model(config, on_cpu(), recompute="full")
