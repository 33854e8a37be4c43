"""Muon: what PyTorch's computes, in batches that ranks share out."""

from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fastgpt.config.config import OptimConfig
from fastgpt.parallel import distributed
from fastgpt.parallel.distributed import World
from fastgpt.parallel.fsdp import norms
from fastgpt.train import muon
from fastgpt.train.muon import Muon
from fastgpt.train.optim import Optimizers

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
        if step == 2:  # checkpoints of before are read, and those of now by others
            states = [optimizer.state_dict() for optimizer in pair]
            for optimizer, state in zip(pair, reversed(states)):
                optimizer.load_state_dict(state)
        before = [weight.detach().clone() for weight in weights]
        for optimizer, own in zip(pair, (weights, others)):
            advance(optimizer, own, step)
        for old, ours, theirs in zip(before, weights, others):
            # equal bits on x86; batched products of other libraries may round another way
            assert (ours - theirs).norm() < 0.01 * (theirs - old).norm()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_on_a_cpu_it_iterates_in_the_runs_precision(precision):
    model = nn.Module()
    model.h = nn.ModuleList([nn.Linear(32, 96, bias=False)])
    settings = OptimConfig(kind="muon", muon_lr=0.02, beta1=0.8, weight_decay=0.0)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    _, optimizer = Optimizers(cast(Any, model), settings, scaler, precision=precision).all
    [weight] = weights = list(model.parameters())
    before = weight.detach().clone()
    advance(optimizer, weights, 0)
    group = optimizer.param_groups[0]
    sums = cast(torch.Tensor, weight.grad) * (1 - SETTINGS["momentum"] ** 2)
    options = group["ns_coefficients"], group["ns_steps"], group["eps"]
    [exact] = muon.orthogonalised(sums[None], *options) * -SETTINGS["lr"] * 3**0.5
    error = (weight - before - exact).norm() / exact.norm()
    assert error < 1e-4 if precision == "fp32" else 1e-3 < error < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_decay_as_pytorchs(dtype):
    weights = matrices(dtype=dtype)
    others = twins(weights)
    for optimizer in (Muon(weights, World(), **SETTINGS), torch.optim.Muon(others, **SETTINGS)):
        for weight in optimizer.param_groups[0]["params"]:
            weight.grad = torch.zeros_like(weight)
        optimizer.step()
    assert all(map(torch.equal, weights, others))


def as_one_of_two():
    """Compares this rank's weights with those of Muon on one rank, bit by bit."""
    world = distributed.start("cpu")
    torch.manual_seed(0)
    weights = matrices()
    alone = twins(weights)
    together, single = Muon(weights, world, **SETTINGS), Muon(alone, World(), **SETTINGS)
    orthogonalised, taken = muon.orthogonalised, []

    def counted(x, *rest):
        taken.append(len(x))
        return orthogonalised(x, *rest)

    for step in range(3):
        with mock.patch.object(muon, "orthogonalised", counted):
            advance(together, weights, step)
        advance(single, alone, step)
    assert all(torch.equal(a, b) for a, b in zip(weights, alone))
    assert taken == 3 * [2, 2, 2, 2, 1], "half of each three, rounded up, and half of one"


def with_shares(placement):
    """Compares weights whose rows or columns are shared out with those of one rank, bit by bit."""
    world = distributed.start("cpu")
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("shard",))
    torch.manual_seed(0)
    alone = matrices()
    weights = [nn.Parameter(distribute_tensor(x.detach(), mesh, [placement])) for x in alone]
    together, single = Muon(weights, world, **SETTINGS), Muon(alone, World(), **SETTINGS)
    for step in range(3):
        advance(single, alone, step)
        for own, one in zip(weights, alone):
            own.grad = distribute_tensor(one.grad, mesh, [placement])
        together.step()
    assert all(torch.equal(a.full_tensor(), b) for a, b in zip(weights, alone))
    grads = [[cast(torch.Tensor, x.grad) for x in every] for every in (weights, alone)]
    torch.testing.assert_close(*map(norms, grads), rtol=1e-6, atol=0)


def test_ranks_that_share_the_work_get_what_one_gets(ranks):
    ranks(as_one_of_two)
    for placement in (Shard(0), Shard(1)):
        ranks(with_shares, placement)
