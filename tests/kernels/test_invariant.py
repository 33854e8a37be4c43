"""Batch invariance: a row's result has the same bits whatever else is in the batch."""

import random
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from fastgpt import kernels
from fastgpt.kernels import invariant, runtime
from fastgpt.kernels.bias_act.op import ACTIVATIONS
from tests.parity import several


@pytest.fixture(params=[8, pytest.param(300, marks=pytest.mark.slow)])
def count(request) -> int:
    """Number of random cases; fewer where compiled code is executed on a CPU."""
    return 2 if runtime._fake_device is not None else request.param


@pytest.fixture(params=["kernels", "plain"])
def form(request, monkeypatch) -> str:
    """Runs the kernels (here interpreted), or what stands for them where none run."""
    if request.param == "plain":
        if runtime._fake_device is not None:
            pytest.skip("no compiled code")
        for op in ("bias_act", "decode_attention", "rotary", "norm", "cross_entropy"):
            module = __import__(f"fastgpt.kernels.{op}.op", fromlist=["op"])
            monkeypatch.setattr(module, "runs_kernels", lambda device: False)
    elif runtime.INTERPRETING:
        # the interpreter's products are numpy's, whose bits depend on the place of a row
        monkeypatch.setattr(np, "matmul", lambda a, b, dtype: (a[:, :, None] * b).sum(1, dtype))
    return request.param


same = partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True)


def by_rows(draw, f, *rows: Tensor) -> None:
    """Checks that f(rows) gives some rows, alone and in another order, the same bits."""
    M = len(rows[0])
    picked = draw.sample(range(M), draw.randint(1, M))
    for y, z in zip(several(f(*rows)), several(f(*(x[picked] for x in rows)))):
        same(z, y[picked])


def norms(draw, make) -> None:
    M, N = draw.randint(1, 40), draw.choice([1, 48, 65, 768])
    x, residual, weight, bias = make(M, N), make(M, N), make(N), make(N)
    by_rows(draw, lambda x: kernels.layer_norm(x, weight, bias, 1e-5), x)
    by_rows(draw, lambda x: kernels.rms_norm(x, weight, 1e-6), x)
    by_rows(draw, lambda x, r: kernels.add_layer_norm(x, r, weight, bias, 1e-5), x, residual)
    by_rows(draw, lambda x, r: kernels.add_rms_norm(x, r, weight, 1e-6), x, residual)


def activations(draw, make) -> None:
    M, N = draw.randint(1, 40), draw.choice([2, 50, 256, 1030])
    kind, bias = draw.choice(list(ACTIVATIONS)), make(N)
    by_rows(draw, lambda x: kernels.bias_act(x, bias, kind), make(M, N))


def rotary(draw, make) -> None:
    B, T, D = draw.randint(1, 5), draw.randint(1, 30), draw.choice([2, 6, 16, 64])
    cos, sin = torch.randn(T, D // 2).float(), torch.randn(T, D // 2).float()
    q, k = make(B, T, 3, D), make(B, T, 1, D)
    by_rows(draw, lambda q, k: kernels.rotary(q, k, cos, sin), q, k)
    t = draw.randint(1, T)
    shorter = kernels.rotary(q[:, :t], k[:, :t], cos[:t], sin[:t])
    for y, z in zip(kernels.rotary(q, k, cos, sin), shorter):
        same(z, y[:, :t])


def cross_entropy(draw, make) -> None:
    M, V = draw.randint(1, 30), draw.choice([5, 65, 1000])
    options = {"z_loss": draw.choice([0.0, 0.1]), "softcap": draw.choice([None, 20.0])}
    loss = partial(kernels.cross_entropy, reduction="none", **options)
    by_rows(draw, loss, make(M, V), torch.randint(V, (M,)))


def attention(draw, make) -> None:
    B, T, D, K = draw.randint(1, 3), draw.randint(1, 150), draw.choice([16, 20, 64]), 1
    q, k, v = make(B, T, 2 * K, D), make(B, T, K, D), make(B, T, K, D)
    window = draw.choice([None, None, 20])
    op = partial(kernels.attention, window=window)
    by_rows(draw, op, q, k, v)
    t = draw.randint(1, T)
    same(op(q[:, :t], k[:, :t], v[:, :t]), op(q, k, v)[:, :t])


def decode_attention(draw, make) -> None:
    """Also as many tokens at once as one after the other, in a cache of another size."""
    B, T, D, K = draw.randint(1, 3), draw.randint(1, 150), draw.choice([16, 20, 64]), 2
    H, page = K * draw.choice([1, 2, 12]), 16
    Tq = draw.randint(1, min(T, 20))
    q, k, v = make(B, Tq, H, D), make(B, T, K, D), make(B, T, K, D)
    lengths = torch.tensor([draw.randint(Tq, T) for _ in range(B)])
    starts = draw.choice([None, (torch.rand(B, Tq) * (lengths - Tq + 1)[:, None]).long()])
    whole = kernels.decode_attention(q, k, v, lengths, starts=starts)
    b, i = draw.randrange(B), draw.randrange(Tq)
    used = int(lengths[b]) - Tq + i + 1
    room = used + draw.randint(0, 60)
    cache = torch.zeros(2, room, K, D, dtype=k.dtype)
    cache[:, :used] = torch.stack((k[b, :used], v[b, :used]))
    pages = -(-room // page)
    paged = torch.zeros(2, pages * page, K, D, dtype=k.dtype)
    paged[:, :room] = cache
    table = {"block_table": torch.arange(pages, dtype=torch.int32)[None]}
    options = {} if starts is None else {"starts": starts[b : b + 1, i : i + 1]}
    one, length = q[b : b + 1, i : i + 1], torch.tensor([used])
    for caches, more in ((cache[:, None], {}), (paged.view(2, pages, page, K, D), table)):
        alone = kernels.decode_attention(one, *caches, length, **options, **more)
        same(alone[0, 0], whole[b, i])


def linear(draw, make) -> None:
    M, (K, N) = draw.choice([1, 3, 8, 70, 600]), draw.choice([(64, 48), (65, 33), (768, 256)])
    x, weight, bias = make(M, K), make(N, K), make(N)
    by_rows(draw, lambda x: kernels.linear(x, weight, bias), x)
    rtol, atol = (1e-4, 1e-4) if x.dtype == torch.float32 else (0.02, 0.5)
    expected = torch.nn.functional.linear(x, weight, bias)
    torch.testing.assert_close(kernels.linear(x, weight, bias), expected, rtol=rtol, atol=atol)


OPS = [norms, activations, rotary, cross_entropy, attention, decode_attention, linear]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.brief
def test_rows_of_a_batch(op, count, form, device):
    if op is attention and form == "plain":
        pytest.skip("attention over a cache stands for it: decode_attention")
    draw = random.Random(op.__name__)
    # the interpreter's bf16 is wrong
    narrow = torch.bfloat16 if runtime._fake_device is not None else torch.float16
    with kernels.batch_invariant():
        for case in range(count):
            torch.manual_seed(case)
            dtype = draw.choice([torch.float32, narrow])
            op(draw, lambda *shape, dtype=dtype: torch.randn(shape, device=device).to(dtype))


def test_the_mode_is_needed():
    """PyTorch's product of one row has other bits: a test of bits could otherwise not fail."""
    torch.manual_seed(0)
    x, weight = torch.randn(512, 768), torch.randn(256, 768)
    rows = torch.cat([kernels.linear(row[None], weight) for row in x])
    assert not torch.equal(rows, kernels.linear(x, weight))


@pytest.mark.parametrize("unlike", ["tile of 512", "batch", "place"])
def test_products_that_depend_on_size_or_place_are_not_used(monkeypatch, unlike):
    product = invariant._product

    def other(a, b):
        y = product(a, b)
        if unlike == "place":
            y[:, 1:2] *= 1.5
        if (unlike == "tile of 512" and a.shape[1] > 64) or (unlike == "batch" and len(a) > 1):
            y = y * 1.5
        return y

    monkeypatch.setattr(invariant, "_product", other)
    invariant._keeps_bits.cache_clear()
    a, b = torch.randn(3, 600, 64), torch.randn(3, 64, 32)
    found = invariant.products(a, b)
    invariant._keeps_bits.cache_clear()
    torch.testing.assert_close(found, a @ b, rtol=1e-4, atol=1e-4)


def test_too_many_places_are_an_error(device):
    cache = torch.empty(1, 1, 1, 16, device=device).expand(1, 200_000, 1, 16)
    q, lengths = cache[:, :1], torch.ones(1, dtype=torch.int64, device=device)
    with kernels.batch_invariant(), pytest.raises(ValueError, match="k_cache: expected at most"):
        kernels.decode_attention(q, cache, cache, lengths)
