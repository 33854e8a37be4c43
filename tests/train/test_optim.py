"""Optimizers: PyTorch's steps, with Muon in batches that ranks share out; learning rates."""

import copy
import math
from typing import Any, cast
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fastgpt.config.config import OptimConfig
from fastgpt.model.gpt import GPT
from fastgpt.parallel import distributed
from fastgpt.parallel.distributed import World
from fastgpt.parallel.fsdp import norms
from fastgpt.train import muon
from fastgpt.train.muon import Muon
from fastgpt.train.optim import Optimizers, lr_ratio
from tests.models import initial

KINDS = ("adamw", "muon")
RATIOS = (1.0, 0.25, 0.5, 1.0)


def tiny_model(**options) -> GPT:
    return initial(num_heads=2, dim=16, context=8, vocab_size=64, **options)


def optimizers(model: GPT, *, fp16: bool = False, scale: float = 4.0, **options) -> Optimizers:
    scaler = torch.amp.GradScaler("cpu", enabled=fp16, init_scale=scale)
    return Optimizers(model, OptimConfig(**options), scaler)


def stepped(optimizers: Optimizers, ratio: float) -> torch.Tensor:
    """Takes a step, and returns the gradients' norm."""
    optimizers.set_lr(ratio)
    norm = optimizers.clip()
    optimizers.step()
    return norm


def set_gradients(model: GPT, step: int = 0, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(step)
    for p in model.parameters():
        p.grad = scale * torch.randn(p.shape, generator=generator)


def weights(model: GPT) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("grad_clip", [1.0, 0.0, 1e9])
def test_steps_are_those_of_pytorchs_own_loop(kind, grad_clip):
    twin = copy.deepcopy(ours := tiny_model())
    before = weights(ours)
    optimizer = optimizers(
        ours, kind=kind, grad_clip=grad_clip, lr=3e-3, muon_lr=0.1, beta1=0.8, beta2=0.9,
        weight_decay=0.2,
    )  # fmt: skip
    blocks = [p for p in twin.h.parameters() if p.dim() == 2 and kind == "muon"]
    taken = {id(p) for p in blocks}
    matrices = [p for p in twin.parameters() if p.dim() >= 2 and id(p) not in taken]
    vectors = [p for p in twin.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.2}, {"params": vectors, "weight_decay": 0.0}]
    plain = [torch.optim.AdamW(groups, lr=3e-3, betas=(0.8, 0.9), foreach=False)]
    if blocks:
        plain.append(torch.optim.Muon(blocks, lr=0.1, momentum=0.9, weight_decay=0.2))
    for step in range(4):
        set_gradients(ours, step, scale=step + 1.0)
        set_gradients(twin, step, scale=step + 1.0)
        norm = math.sqrt(sum(p.grad.double().square().sum().item() for p in twin.parameters()))
        if grad_clip and norm > grad_clip:
            for p in twin.parameters():
                p.grad *= grad_clip / norm
        for one, peak in zip(plain, (3e-3, 0.1)):
            for group in one.param_groups:
                group["lr"] = peak * RATIOS[step]
            one.step()
        returned = stepped(optimizer, RATIOS[step])
        assert returned.shape == ()
        assert returned.item() == pytest.approx(norm)  # before clipping
    for old, a, b in zip(before.values(), ours.parameters(), twin.parameters()):
        # Muon's products are in bf16; without Nesterov it would be 40 % off
        assert (a - b).norm() < (0.01 if kind == "muon" else 1e-4) * (b - old).norm()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fp16", [False, True])
def test_state_restores_to_the_same_steps(kind, fp16):
    model = tiny_model()
    options = {"kind": kind, "fp16": fp16, "lr": 1e-2}
    optimizer = optimizers(model, **options)

    def advance(model, optimizer, steps):
        for step in steps:
            set_gradients(model, step, scale=4.0 if fp16 else 1.0)
            optimizer.scaler.scale(torch.zeros(()))  # as the loss, before each backward
            stepped(optimizer, 1 / (1 + step))

    advance(model, optimizer, range(3))
    state = copy.deepcopy(optimizer.state_dict())
    other = copy.deepcopy(model)
    resumed = optimizers(other, **options, scale=32.0)
    resumed.load_state_dict(state)
    before = weights(model)
    advance(model, optimizer, range(3, 6))
    advance(other, resumed, range(3, 6))
    for name, p in other.named_parameters():
        assert torch.equal(p, model.get_parameter(name)), name
        assert not torch.equal(p, before[name]), name
    assert resumed.scaler.get_scale() == optimizer.scaler.get_scale()


def test_fp16_gradients_are_unscaled_before_clipping():
    twin = copy.deepcopy(model := tiny_model())
    scaled, plain = optimizers(model, fp16=True, kind="muon"), optimizers(twin, kind="muon")
    for step in range(3):  # larger each time: AdamW takes no notice of one factor for all
        scaled.scaler.scale(torch.zeros(()))
        set_gradients(model, step, scale=4.0 * 10**step)
        set_gradients(twin, step, scale=10.0**step)
        torch.testing.assert_close(stepped(scaled, 1.0), stepped(plain, 1.0))
    for a, b in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("where", "value"), [("wte.weight", math.inf), ("h.0.attn.c_proj.weight", math.nan)]
)
def test_fp16_step_with_a_gradient_that_is_not_finite_is_skipped_whole(kind, value, where):
    model = tiny_model()
    optimizer = optimizers(model, fp16=True, kind=kind)
    for step in range(2):  # the second one would move by momentum alone
        before = weights(model)
        optimizer.scaler.scale(torch.zeros(()))
        set_gradients(model, step, scale=4.0)
        if step == 1:
            model.get_parameter(where).grad[0, 0] = value
        stepped(optimizer, 1.0)
    assert optimizer.scaler.get_scale() == 2.0
    for name, weight in weights(model).items():
        assert weight.equal(before[name]), name


SETTINGS: dict[str, Any] = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}
SHAPES = 3 * [(96, 32), (32, 32), (128, 32), (32, 128)] + [(20, 12)]


def matrices(shapes=SHAPES, **options):
    return [nn.Parameter(torch.randn(shape, **options)) for shape in shapes]


def twins(weights):
    return [nn.Parameter(weight.detach().clone()) for weight in weights]


def advance(optimizer, weights, step):
    generator = torch.Generator().manual_seed(step)
    for weight in weights:
        weight.grad = torch.randn(weight.shape, generator=generator)
    optimizer.step()


@pytest.mark.parametrize("most", ["MOST_ON_CPU", "MOST"])
def test_updates_are_pytorchs_and_states_are_exchanged(monkeypatch, most):
    monkeypatch.setattr(muon, most, 2 * 128 * 32)  # two of the largest at once, of three
    monkeypatch.setattr(torch.Tensor, "is_cpu", most == "MOST_ON_CPU")
    weights = matrices()
    others = twins(weights)
    pair = Muon(weights, World(), **SETTINGS), torch.optim.Muon(others, **SETTINGS)
    for step in range(4):
        if step == 2:  # each reads the other's checkpoint
            states = [optimizer.state_dict() for optimizer in pair]
            for optimizer, state in zip(pair, reversed(states)):
                optimizer.load_state_dict(state)
        before = [weight.detach().clone() for weight in weights]
        for optimizer, own in zip(pair, (weights, others)):
            advance(optimizer, own, step)
        for old, ours, theirs in zip(before, weights, others):
            # equal bits on x86; batched products of other libraries may round another way
            assert (ours - theirs).norm() < 0.01 * (theirs - old).norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_cpu_it_iterates_in_the_runs_precision(dtype):
    model, scaler = tiny_model(), torch.amp.GradScaler("cpu", enabled=False)
    precision = "fp32" if dtype == torch.float32 else "bf16"
    _, optimizer = Optimizers(model, OptimConfig(kind="muon"), scaler, precision=precision).all
    set_gradients(model)
    with mock.patch.object(muon, "orthogonalised", wraps=muon.orthogonalised) as used:
        optimizer.step()
    assert {call.args[0].dtype for call in used.mock_calls} == {dtype}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_decay_as_pytorchs(dtype):
    weights = matrices(dtype=dtype)
    others = twins(weights)
    for optimizer in (Muon(weights, World(), **SETTINGS), torch.optim.Muon(others, **SETTINGS)):
        for weight in optimizer.param_groups[0]["params"]:
            weight.grad = torch.zeros_like(weight)
        optimizer.step()
    assert all(map(torch.equal, weights, others))


def as_one_of_two(placement):
    """Compares weights, whole or shared out, with Muon on one rank, bit by bit."""
    world = distributed.start("cpu")
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("shard",))

    def share(x):
        return distribute_tensor(x.detach(), mesh, [placement]) if placement else x.detach().clone()

    torch.manual_seed(0)
    alone = matrices()
    weights = [nn.Parameter(share(x)) for x in alone]
    together, single = Muon(weights, world, **SETTINGS), Muon(alone, World(), **SETTINGS)
    taken = []
    for step in range(3):
        advance(single, alone, step)
        for own, one in zip(weights, alone):
            own.grad = share(one.grad)
        with mock.patch.object(muon, "orthogonalised", wraps=muon.orthogonalised) as used:
            together.step()
        taken += [len(call.args[0]) for call in used.mock_calls]
    assert taken == 3 * [2, 2, 2, 2, 1], "half of each three, rounded up, and half of one"
    wholes = [x.full_tensor() if placement else x for x in weights]
    assert all(map(torch.equal, wholes, alone))
    grads = [[cast(torch.Tensor, x.grad) for x in every] for every in (weights, alone)]
    torch.testing.assert_close(*map(norms, grads), rtol=1e-6, atol=0)


def test_ranks_that_share_the_work_get_what_one_gets(ranks):
    for placement in (None, Shard(0), Shard(1)):
        ranks(as_one_of_two, placement)


SCHEDULES = {
    "cosine": lambda x: math.cos(math.pi * x / 2) ** 2,
    "linear": lambda x: 1 - x,
    "wsd": lambda x: min(1.0, (1 - x) / 0.25),  # a fifth of 100 steps, 20 of them warmup
    "constant": lambda x: 1.0,
}
"""Factor between the smallest ratio (0) and the peak (1) after a share x of the decay."""


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("low", [0.0, 0.2])
def test_an_even_rise_to_the_peak_and_then_the_schedules_own_shape(schedule, low):
    steps, warmup = 100, 20
    config = OptimConfig(schedule=schedule, warmup_steps=warmup, min_lr_ratio=low)
    ratios = [lr_ratio(step, steps, config) for step in (*range(steps), 5 * steps)]
    assert ratios[:warmup] == pytest.approx([n / warmup for n in range(1, warmup + 1)])
    assert ratios[warmup] == 1.0  # the first step after the warmup is still at the peak
    low = 1.0 if schedule == "constant" else low
    shape = [SCHEDULES[schedule](n / 80) for n in (*range(80), 80)]
    assert ratios[warmup:] == pytest.approx([low + (1 - low) * y for y in shape])


def test_wsd_whose_fall_reaches_into_the_warmup_starts_it_after():
    config = OptimConfig(schedule="wsd", warmup_steps=90, min_lr_ratio=0.0)
    ratios = [lr_ratio(step, 100, config) for step in range(89, 100)]
    assert ratios == pytest.approx([1.0, *(1 - n / 10 for n in range(10))])


@given(
    schedule=st.sampled_from(list(SCHEDULES)), steps=st.integers(1, 500),
    warmup=st.integers(0, 600), low=st.floats(0, 1), step=st.integers(0, 1000),
)  # fmt: skip
def test_stays_in_bounds_and_never_rises_after_the_warmup(schedule, steps, warmup, low, step):
    config = OptimConfig(schedule=schedule, warmup_steps=warmup, min_lr_ratio=low)
    here, after = (lr_ratio(n, steps, config) for n in (step, step + 1))
    assert 0 <= here <= 1
    assert here == lr_ratio(step, steps, config)
    if step < steps:
        assert here > 0
    if step < warmup - 1:
        assert here < after
    else:
        assert low <= here + 1e-12
        assert after <= here
