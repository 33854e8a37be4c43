"""Activations that are computed again: the same bits, attention only once, and the memory."""

import weakref
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from fastgpt.config.model import ModelConfig
from fastgpt.errors import UserError
from fastgpt.kernels.runtime import LAUNCHES
from fastgpt.model.build import build_model
from tests.models import OPTIONS, TINY, build, on_cpu

KINDS = ["none", "selective", "full"]


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


class Living(TorchDispatchMode):
    """Knows the memory of all tensors that are made, as long as they live."""

    def __init__(self):
        super().__init__()
        self.known = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        for x in tree_iter(out):
            if isinstance(x, torch.Tensor):
                memory = x.untyped_storage()
                self.known[id(memory)] = weakref.ref(memory)
        return out


def kept(layers, recompute):
    """Counts the bytes that live between forward and backward."""
    config = replace(TINY, num_layers=layers)
    model = build_model(config, on_cpu(attention="sdpa"), recompute=recompute).train()
    tokens = torch.randint(50, (2, 16))
    with Living() as living:
        loss = model(tokens, tokens)
    assert loss.requires_grad
    weights = {id(x.untyped_storage()) for x in model.parameters()}
    alive = [ref() for number, ref in living.known.items() if number not in weights]
    return sum(memory.nbytes() for memory in alive if memory is not None)


def test_memory_of_a_layer_is_that_of_the_account():
    """Numbers per token and unit of width, in fp32.

    full: the output of the block before, and the residual stream (2). selective: these, queries,
    keys and values (3), the heads' outputs (1) with a number for each head, and the stream after
    attention (1). none: two sums and what they are normalised to (4) with two numbers each,
    attention's (4, and the number for each head), and the feed-forward layer's (8). full and
    selective: also a copy of the bias that the block hands on.
    """
    per_token = 4 * 2 * 16
    found = {kind: (kept(4, kind) - kept(3, kind)) / per_token for kind in KINDS}
    C, H = TINY.dim, TINY.num_heads
    bias = 4 * C / per_token
    assert found == {"full": 2 * C + bias, "selective": 7 * C + H + bias, "none": 16 * C + H + 4}


def test_steps_of_the_lecture_are_refused():
    config = ModelConfig(architecture="residual", activation="relu", vocab_size=50)
    with pytest.raises(UserError, match=r"--train.recompute is full"):
        build_model(config, on_cpu(), recompute="full")
