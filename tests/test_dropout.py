import math

import pytest
import torch

from fastgpt.kernels.dropout.op import dropout, dropout_keep

LANES = 2**16


@pytest.mark.parametrize("p", [0.0, 1e-6, 0.01, 0.1, 0.5, 0.9, 0.999, 1 - 1e-9])
def test_share_scale_and_mean(p):
    keep, scale = dropout_keep((1_000_003,), p)
    dropped = min(round(p * LANES), LANES - 1)  # in lanes: never all of them
    assert scale == LANES / (LANES - dropped)
    share = 1 - dropped / LANES
    assert abs(share - (1 - p)) <= 1 / LANES
    deviation = math.sqrt(share * (1 - share) / keep.numel())
    assert abs(keep.double().mean().item() - share) <= 5 * deviation


@pytest.mark.parametrize("p", [0.25, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_elements_are_zero_or_scaled(dtype, p):
    x = torch.linspace(1, 2, 1000, dtype=dtype)
    y = dropout(x, p)
    assert y.dtype == dtype
    kept = y != 0
    assert kept.any()
    assert not kept.all()
    torch.testing.assert_close(y[kept], x[kept] / (1 - p))


def test_probability_of_zero_changes_nothing():
    x = torch.randn(1001)
    assert torch.equal(dropout(x, 0.0), x)


def test_repeats_from_the_seed_and_only_from_it():
    x = torch.ones(4099)
    torch.manual_seed(7)
    first, second = dropout(x, 0.5), dropout(x, 0.5)
    assert not torch.equal(first, second)
    torch.manual_seed(7)
    assert torch.equal(dropout(x, 0.5), first)


def test_the_four_lanes_of_a_number_are_independent():
    lanes = dropout_keep((4 * 100_000,), 0.5)[0].double().view(-1, 4)
    correlation = torch.corrcoef(lanes.T) - torch.eye(4)
    assert correlation.abs().max() < 5 / math.sqrt(len(lanes))
    after = torch.corrcoef(torch.stack((lanes[:-1].flatten(), lanes[1:].flatten())))[0, 1]
    assert abs(after) < 5 / math.sqrt(lanes.numel())


def test_gradient_goes_through_the_mask():
    x = torch.full((5, 7), 3.0, requires_grad=True)
    y = dropout(x, 0.4)
    (dx,) = torch.autograd.grad(y, x, upstream := torch.randn(5, 7))
    torch.testing.assert_close(dx, upstream * y.detach() / 3)
    assert (dx == 0).any()


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3,), (5,), (2, 3, 7), (4, 0, 2)], ids=str)
def test_takes_any_shape(shape):
    keep, _ = dropout_keep(shape, 0.5)
    assert (keep.shape, keep.dtype) == (shape, torch.bool)
    x = torch.ones(shape)
    torch.manual_seed(2)
    y = dropout(x, 0.5)
    torch.manual_seed(2)
    assert torch.equal(y, x * dropout_keep(shape, 0.5)[0] * 2)


def test_takes_strided_input():
    x = torch.arange(1.0, 61).view(6, 10)
    torch.manual_seed(4)
    expected = dropout(x.T.contiguous(), 0.5)
    torch.manual_seed(4)
    assert torch.equal(dropout(x.T, 0.5), expected)
