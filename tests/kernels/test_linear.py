"""Tests of the linear layer's choice between PyTorch's libraries, and of what oneDNN computes."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from torch.utils.flop_counter import FlopCounterMode

from fastgpt.kernels import linear, linear_cross_entropy, runtime
from fastgpt.kernels.cross_entropy import linear as head
from fastgpt.kernels.linear import op

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this build of PyTorch lacks oneDNN"
)
N, SMALL, LARGE = 256, 160, 224


@pytest.fixture
def products(monkeypatch):
    """Makes oneDNN the faster library, and returns the shapes that it multiplies."""
    shapes, product = [], op.product

    def counted(a, b, bias=None):
        shapes.append((*a.shape, len(b)))
        return product(a, b, bias)

    monkeypatch.setattr(op, "product", counted)
    monkeypatch.setattr(head, "product", counted)
    monkeypatch.setattr(op, "faster_by_onednn", lambda: True)
    return shapes


def tensors(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


UPSTREAM = {
    "contiguous": lambda dy: dy,
    "transposed": lambda dy: dy.mT.contiguous().mT,
    "every other": lambda dy: dy.repeat_interleave(2, -1)[..., ::2],
    "one number": lambda dy: dy.flatten()[0].expand(dy.shape),
}


@pytest.mark.parametrize("layout", UPSTREAM.values(), ids=UPSTREAM)
@pytest.mark.parametrize(
    ("inputs", "outputs", "bias"), [(SMALL, LARGE, True), (LARGE, SMALL, False)]
)
def test_results_and_gradients_are_those_of_fp64(products, layout, bias, inputs, outputs):
    given = tensors((2, N // 2, inputs), (outputs, inputs), *([(outputs,)] if bias else []))
    wide = [x.detach().double().requires_grad_() for x in given]
    y, true = linear(*given), F.linear(*wide)
    dy = layout(torch.randn(true.shape))
    grads = torch.autograd.grad(y, given, dy)
    for got, want in zip((y, *grads), (true, *torch.autograd.grad(true, wide, dy.double()))):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want.float(), rtol=1e-4, atol=1e-4)
    assert products[2] == (SMALL, N, LARGE)
    assert len(products) == 3


def test_few_rows(products):
    """The weight's gradient is not turned; without gradients one row goes to oneDNN."""
    dy, x = (t.detach() for t in tensors((3, LARGE), (3, SMALL)))
    torch.testing.assert_close(op.transposed_product(dy, x), dy.T @ x)
    assert products == [(LARGE, 3, SMALL)]
    x, weight, bias = tensors((1, 1, 768), (1024, 768), (1024,))
    with torch.no_grad():
        got, want = linear(x, weight, bias), F.linear(x, weight, bias)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert products[1:] == [(1, 768, 1024)]


def test_onednn_gets_no_slices_of_columns():
    x = torch.randn(6, 8)
    for same in (x, x.T, x[1:], x[1:].T):
        assert op.dense(same) is same
    for other in (x[:, 1:], x[:, ::2], x[:, :5].T, x[:, :1].expand(6, 8)):
        copy = op.dense(other)
        assert copy.is_contiguous()
        assert torch.equal(copy, other)


def test_what_differentiates_or_listens_otherwise(products):
    """A second derivative raises where oneDNN has none; a listener sees PyTorch's own op."""
    x, weight = tensors((N, SMALL), (LARGE, SMALL))
    (dx,) = torch.autograd.grad(linear(x, weight).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()
    products.clear()
    with FlopCounterMode(display=False) as counter:
        linear(x, weight)
    assert counter.get_total_flops() == 2 * N * SMALL * LARGE
    torch.func.grad(lambda x: linear(x, weight).sum())(x)
    assert not products


WRONG = {
    "inner size": lambda x, w, b: (x[:, 1:], w, b),
    "bias's size": lambda x, w, b: (x, w, b[1:]),
    "bias's dtype": lambda x, w, b: (x, w, b.bfloat16()),
    "weight's dtype": lambda x, w, b: (x, w.bfloat16(), b),
    "weight's dimensions": lambda x, w, b: (x, w[None], b),
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_wrong_arguments_get_pytorchs_own_error(products, change):
    with pytest.raises(RuntimeError):
        linear(*change(*tensors((N, SMALL), (LARGE, SMALL), (LARGE,))))
    assert not products


OTHERS = {
    "small": (8, 8, torch.float32, False),
    "no rows": (0, LARGE, torch.float32, False),
    "fp64": (N, LARGE, torch.float64, False),
    "bf16": (N, LARGE, torch.bfloat16, False),
    "autocast": (N, LARGE, torch.float32, True),
}


@pytest.mark.parametrize(("rows", "outputs", "dtype", "autocast"), OTHERS.values(), ids=OTHERS)
def test_what_onednn_is_not_faster_at_is_pytorchs_own(products, rows, outputs, dtype, autocast):
    x, weight = (t.to(dtype) for t in tensors((rows, SMALL), (outputs, SMALL)))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert torch.equal(linear(x, weight), F.linear(x, weight))
    assert not products


@pytest.mark.parametrize("vendor", ["AuthenticAMD", "GenuineIntel"])
@pytest.mark.parametrize("capability", ["AVX512", "AVX2"])
def test_onednn_is_for_amds_cpus_with_avx512(monkeypatch, tmp_path, vendor, capability):
    info = tmp_path / "cpuinfo"
    info.write_text(f"vendor_id : {vendor}\n", encoding="utf-8")
    monkeypatch.setattr(op, "Path", lambda path: info)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    faster = op.faster_by_onednn.__wrapped__()
    assert faster is ((vendor, capability) == ("AuthenticAMD", "AVX512"))


@pytest.mark.parametrize("bias", [True, False])
def test_the_head_is_multiplied_by_onednn_in_chunks(products, bias, monkeypatch):
    monkeypatch.setattr(runtime, "INTERPRETING", False)  # no kernel: the products alone are meant
    monkeypatch.setattr(runtime, "_fake_device", None)
    C, V = 64, 1000
    x, weight, *rest = tensors((N, C), (V, C), *([(V,)] if bias else []))
    given, results = (x, weight, torch.arange(N) % V, *rest), []
    for loss_of in (linear_cross_entropy, head.linear_cross_entropy_ref):
        loss = loss_of(*given, chunk_tokens=100)
        results.append((loss, *torch.autograd.grad(loss, (x, weight, *rest))))
    assert [shape[0] for shape in products] == [100, 100, 100, 100, 56, 56]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)
