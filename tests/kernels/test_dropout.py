"""Tests specific to dropout; `test_conformance` checks which elements are dropped."""

import math

import pytest
import torch

from fastgpt.kernels.dropout.op import dropout, dropout_keep

LEVELS = 2**16


@pytest.mark.parametrize("p", [0.0, 1e-6, 0.01, 0.1, 0.5, 0.9, 0.999, 1 - 1e-9])
def test_share_scale_and_mean(p):
    keep, scale = dropout_keep((1_000_003,), p, torch.bool)
    dropped = min(round(p * LEVELS), LEVELS - 1)  # in draws: never all of them
    assert scale == LEVELS / (LEVELS - dropped)
    share = 1 - dropped / LEVELS
    assert abs(share - (1 - p)) <= 1 / LEVELS
    deviation = math.sqrt(share * (1 - share) / keep.numel())
    assert abs(keep.double().mean().item() - share) <= 5 * deviation


def test_the_four_draws_of_a_number_are_independent():
    draws = dropout_keep((4 * 100_000,), 0.5, torch.bool)[0].double().view(-1, 4)
    correlation = torch.corrcoef(draws.T) - torch.eye(4)
    assert correlation.abs().max() < 5 / math.sqrt(len(draws))
    after = torch.corrcoef(torch.stack((draws[:-1].flatten(), draws[1:].flatten())))[0, 1]
    assert abs(after) < 5 / math.sqrt(draws.numel())


SHAPES = [(), (0,), (1,), (3,), (2, 3, 7), (4, 0, 2)]
INPUTS = [*map(torch.ones, SHAPES), torch.arange(1.0, 61).view(6, 10).T]


@pytest.mark.parametrize("p", [0.0, 0.5])
@pytest.mark.parametrize("x", INPUTS, ids=lambda x: str(tuple(x.shape)))
def test_input_and_gradient_go_through_the_mask_of_the_seed(x, p):
    x = x.clone().requires_grad_()
    torch.manual_seed(7)
    keep, scale = dropout_keep(tuple(x.shape), p, x.dtype)
    assert (keep.shape, keep.dtype) == (x.shape, x.dtype)
    torch.manual_seed(7)
    y = dropout(x, p)
    (dx,) = torch.autograd.grad(y, x, upstream := torch.randn(x.shape))
    assert torch.equal(y, x * keep * scale)
    assert torch.equal(dx, upstream * keep * scale)
    assert p > 0 or torch.equal(y, x)
    assert p == 0 or x.numel() < 42 or not torch.equal(dropout(x, p), y)  # the next draw
