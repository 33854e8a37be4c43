"""What only a GPU shows of fused attention: `make parity` runs it."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from torch.library import opcheck

from fastgpt.kernels import attention, attention_dropout_mask, attention_packed
from fastgpt.kernels.attention.op import attention_ref
from tests.cuda_proof import (
    assert_nothing_waits,
    assert_on_the_current_stream,
    assert_replays,
    assert_same_bits,
    captured,
    need,
    one_at_a_time,
)
from tests.parity import assert_parity, awkward
from tests.proof import launches
from tests.test_attention_triton import DOCUMENTS, DROPOUT, KERNELS, SHAPES, check, docs, plain

pytestmark = pytest.mark.gpu
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
all_dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


@pytest.fixture(autouse=True)
def products_in_fp32(monkeypatch):
    """What the kernels are compared with must not multiply in tf32."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


def make(B, T, H, D, dtype=torch.bfloat16, K=None):
    qkv = torch.randn(B, T, H + 2 * (K or H), D, device="cuda", dtype=dtype)
    return [x.detach().requires_grad_() for x in qkv.split((H, K or H, K or H), dim=2)]


def outputs_and_gradients(op, inputs, **options):
    out = op(*inputs, **options)
    upstream = torch.linspace(-1, 1, out.shape[1], device="cuda", dtype=out.dtype)
    return [out, *torch.autograd.grad(out, inputs, upstream[:, None, None].expand_as(out))]


# --- the rule of errors ---------------------------------------------------------------------------


@all_dtypes
@pytest.mark.parametrize("case", SHAPES)
def test_attention_matches_reference(case, dtype):
    shape, options = SHAPES[case]
    check(*shape, dtype, device="cuda", **options)


@all_dtypes
@pytest.mark.parametrize("case", DOCUMENTS)
def test_attention_keeps_documents_apart(case, dtype):
    (B, Tq, Tk), longest, options = DOCUMENTS[case]
    doc_ids = docs(B, Tk, longest=longest).cuda()
    check(B, Tq, Tk, 4, 2, 64, dtype, device="cuda", doc_ids=doc_ids, **options)


@all_dtypes
@pytest.mark.parametrize("case", DROPOUT)
def test_dropout_is_that_of_the_mask(case, dtype):
    shape, options = DROPOUT[case]
    check(*shape, dtype, p=0.3, seed=-(2**40) - 3, device="cuda", **options)


# (B, T, H, K, D): GPT-2's heads, larger ones, grouped ones, and head dimensions that are padded
REAL = {
    "gpt2": (16, 1024, 12, 12, 64),
    "gpt2-odd-length": (3, 1000, 12, 12, 64),
    "d128": (2, 2048, 16, 16, 128),
    "d128-grouped": (2, 2048, 16, 4, 128),
    "d256": (1, 1024, 8, 8, 256),
    "d32": (4, 1024, 8, 8, 32),
    "d16": (4, 1024, 8, 8, 16),
    "d80": (2, 512, 8, 8, 80),
    "d96": (2, 512, 8, 8, 96),
}


@all_dtypes
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("shape", REAL)
def test_attention_at_real_shapes(shape, causal, dtype):
    B, T, H, K, D = REAL[shape]
    inputs = {"q": awkward(B, T, H, D, dtype=dtype, device="cuda")}
    for name in "kv":
        inputs[name] = awkward(B, T, K, D, dtype=dtype, device="cuda")
    with launches(*KERNELS):
        assert_parity(
            attention, attention_ref, inputs, eager=plain, truth_dtype=torch.float32
            if dtype != torch.float32 else torch.float64, causal=causal,
        )  # fmt: skip


@all_dtypes
@pytest.mark.parametrize(
    "options",
    [{"window": 256}, {"window": 100, "docs": 300}, {"docs": 300, "causal": False}],
    ids=str,
)
@pytest.mark.parametrize("D", [64, 128])
def test_masks_at_real_shapes(options, dtype, D):
    options = dict(options)
    if longest := options.pop("docs", None):
        options["doc_ids"] = docs(4, 1024, longest=longest).cuda()
    check(4, 1024, 1024, 6, 2, D, dtype, device="cuda", **options)


def test_the_mask_is_that_of_the_cpu():
    mask = attention_dropout_mask((2, 3, 100, 90), 0.3, 2**40 + 1)
    assert torch.equal(mask, attention_dropout_mask((2, 3, 100, 90), 0.3, 2**40 + 1, "cuda").cpu())


def test_agrees_with_pytorchs_fused_attention():
    q, k, v = make(4, 1024, 12, 64)
    ours = outputs_and_gradients(attention, (q, k, v))

    def sdpa(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    for a, b in zip(ours, outputs_and_gradients(sdpa, (q, k, v)), strict=True):
        assert (a - b).norm() <= 1e-2 * b.norm()


# --- bits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "options"),
    [((4, 1024, 12, 64), {}), ((2, 777, 8, 128, torch.float16, 2), {"dropout_p": 0.1})],
    ids=["gpt2", "grouped-dropout"],
)
def test_a_thousand_runs_give_the_same_bits(shape, options):
    inputs = make(*shape)
    options = {**options, "dropout_seed": 5}
    assert_same_bits(lambda: outputs_and_gradients(attention, inputs, **options))


def test_packed_and_strided_give_the_bits_of_contiguous_tensors():
    qkv = torch.randn(4, 1000, 36, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    out = attention_packed(qkv, 12)
    (dqkv,) = torch.autograd.grad(out, qkv, torch.ones_like(out))
    views = qkv.detach().split(12, dim=2)
    for tensors in (
        [x.contiguous() for x in views],
        [x.transpose(1, 2).contiguous().transpose(1, 2) for x in views],
        [awkward(*x.shape, dtype=x.dtype, device="cuda").copy_(x) for x in views],
    ):
        leaves = [x.detach().requires_grad_() for x in tensors]
        y = attention(*leaves)
        grads = torch.autograd.grad(y, leaves, torch.ones_like(y))
        assert torch.equal(y, out)
        assert torch.equal(torch.cat(grads, 2), dqkv)


@one_at_a_time
def test_more_than_2_to_the_31_elements():
    need(44)
    T, H, D = 1 << 20, 33, 64  # 2.2e9 elements in each tensor; the window keeps it quick
    one = [torch.randn(1, T, 1, D, device="cuda", dtype=torch.bfloat16) for _ in "qkv"]
    many = [x.expand(1, T, H, D).contiguous() for x in one]
    results = []
    for inputs in (one, many):
        inputs = [x.requires_grad_() for x in inputs]
        results.append(outputs_and_gradients(attention, inputs, window=64))
    for single, all_heads in zip(*results, strict=True):
        for h in (0, H - 1):
            assert torch.equal(all_heads[:, :, h], single[:, :, 0])
    last = attention_ref(*(x[:, -128:] for x in one), window=64)[:, -64:]
    torch.testing.assert_close(results[0][0][:, -64:], last, rtol=2e-2, atol=2e-2)


# --- the device -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [None, 3])
def test_waits_for_nothing(seed):
    inputs = make(2, 256, 4, 64)
    options = {
        "dropout_p": 0.1,
        "dropout_seed": seed,
        "doc_ids": docs(2, 256, longest=100).cuda(),
    }
    assert_nothing_waits(lambda: outputs_and_gradients(attention, inputs, **options), *KERNELS)


def test_is_captured_in_a_cuda_graph():
    inputs = make(2, 256, 4, 64)
    upstream = torch.randn_like(inputs[0])

    def step():
        out = attention(*inputs)
        return [out, *torch.autograd.grad(out, inputs, upstream)]

    assert_replays(step, inputs)


def test_each_replay_draws_its_own_mask():
    inputs = make(2, 256, 4, 64)
    graph, (out,) = captured(lambda: [attention(*inputs, dropout_p=0.3).detach()])
    masked = []
    for _ in range(2):
        graph.replay()
        masked.append(out.clone())
    assert not torch.equal(*masked)


def test_runs_on_the_current_stream():
    inputs = make(2, 512, 4, 64)
    assert_on_the_current_stream(lambda: outputs_and_gradients(attention, inputs), inputs[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_opcheck(dtype):
    q, k, v = make(2, 65, 4, 64, dtype, K=2)
    seed = torch.tensor([5], device="cuda")
    opcheck(torch.ops.fastgpt.attention.default, (q, k, v, None, None, seed, None, True, 9, 0.1))
    qkv = torch.cat((q, k, v), 2).detach().requires_grad_()
    settings = (None, None, None, None, True, None, 0.0)
    opcheck(torch.ops.fastgpt.attention_packed.default, (qkv, 4, *settings))
    options = (None, None, seed, None, True, 9, 0.1)
    with torch.no_grad():
        out, lse = torch.ops.fastgpt.attention.default(q, k, v, *options)
        arguments = (torch.randn_like(out), q.detach(), k.detach(), v.detach(), out, lse)
        opcheck(torch.ops.fastgpt.attention_bwd.default, (*arguments, *options))
        out, lse = torch.ops.fastgpt.attention_packed.default(qkv, 4, *settings)
        arguments = (torch.randn_like(out), qkv.detach(), out, lse, *settings)
        opcheck(torch.ops.fastgpt.attention_packed_bwd.default, arguments)


@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_gives_the_bits_of_eager(dynamic):
    torch.compiler.reset()
    compiled = torch.compile(attention, fullgraph=True, dynamic=dynamic)
    for B, T in ((2, 127), (3, 193)):
        inputs = make(B, T, 4, 64)
        with launches(*KERNELS):
            got = outputs_and_gradients(compiled, inputs)
        for a, b in zip(got, outputs_and_gradients(attention, inputs), strict=True):
            assert torch.equal(a, b)
