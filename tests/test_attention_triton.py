"""Fused attention's kernels: in Triton's interpreter on a CPU, as they are on CUDA."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastgpt.kernels import attention, attention_dropout_mask, attention_packed
from fastgpt.kernels.attention import launch as attention_launch
from fastgpt.kernels.attention.op import attention_mask, attention_ref
from tests.parity import awkward
from tests.proof import assert_kernel_parity, assert_mutations_are_caught, guarded, launches

FWD, DQ, DKV = "_attention_fwd_kernel", "_attention_bwd_dq_kernel", "_attention_bwd_dkv_kernel"
KERNELS = (FWD, DQ, DKV)
DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
both_dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def plain(q, k, v, *, causal=True, scale=None, window=None, doc_ids=None, kept=None) -> Tensor:
    """Attention by PyTorch's operations in the dtype of the inputs: whose error is the measure."""
    _, Tq, H, D = q.shape
    Tk, groups = k.shape[1], H // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, *(x.repeat_interleave(groups, 2) for x in (k, v))))
    scores = q @ k.transpose(-1, -2) * (D**-0.5 if scale is None else scale)
    mask = attention_mask(Tq, Tk, causal=causal, window=window, doc_ids=doc_ids, device=q.device)
    mask = torch.ones((), dtype=torch.bool, device=q.device) if mask is None else mask
    weights = scores.masked_fill(~mask, torch.finfo(q.dtype).min).softmax(-1).masked_fill(~mask, 0)
    return ((weights if kept is None else weights * kept.to(q.dtype)) @ v).transpose(1, 2)


def check(B, Tq, Tk, H, K, D, dtype, *, p=0.0, seed=7, device="cpu", **options):
    """Outputs and all gradients of one case by the rule of errors."""
    inputs = {"q": awkward(B, Tq, H, D, dtype=dtype, device=device)}
    for name in "kv":
        inputs[name] = awkward(B, Tk, K, D, dtype=dtype, device=device)
    kept = attention_dropout_mask((B, H, Tq, Tk), p, seed, device) if p else None

    def op(q, k, v):
        return attention(q, k, v, dropout_p=p, dropout_seed=seed, **options)

    def ref(q, k, v):
        return attention_ref(q, k, v, dropout_p=p, dropout_mask=kept, **options)

    def eager(q, k, v):
        return plain(q, k, v, kept=None if kept is None else kept / (1 - p), **options)

    assert_kernel_parity(op, ref, inputs, kernels=KERNELS, eager=eager)


def docs(B: int, T: int, *, longest: int, seed: int = 0) -> Tensor:
    """(B, T) non-decreasing ids, with gaps, of documents of (longest + 1) / 2 tokens on average."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.rand(B, T, generator=generator) < 2 / (longest + 1)
    return (3 * starts.cumsum(1) - 5).to(torch.int32)


# --- the table ------------------------------------------------------------------------------------

# Interpreted tiles are 64 queries x 32 keys, and 32 queries x 64 keys for dK and dV.
# (B, Tq, Tk, H, K, D), options
SHAPES = {
    "three": ((2, 3, 3, 3, 1, 16), {}),
    "63": ((1, 63, 63, 2, 2, 16), {}),
    "64": ((1, 64, 64, 2, 1, 64), {}),
    "65": ((1, 65, 65, 1, 1, 80), {}),
    "127": ((1, 127, 127, 1, 1, 16), {}),
    "257": ((1, 257, 257, 1, 1, 16), {}),
    "odd-batch-and-heads": ((3, 20, 20, 3, 3, 16), {}),
    "grouped": ((1, 70, 70, 6, 2, 16), {}),
    "last-query": ((2, 1, 127, 2, 1, 64), {}),
    "tail": ((1, 65, 200, 1, 1, 16), {}),
    "queries-that-see-nothing": ((1, 200, 65, 1, 1, 16), {}),
    "full": ((1, 65, 65, 2, 1, 16), {"causal": False}),
    "full-63": ((1, 63, 64, 1, 1, 80), {"causal": False}),
    "cross": ((1, 3, 200, 2, 2, 16), {"causal": False}),
    "cross-few-keys": ((1, 127, 3, 1, 1, 64), {"causal": False}),
    "scale": ((1, 40, 40, 1, 1, 16), {"scale": 0.7}),
    "negative-scale": ((1, 40, 40, 1, 1, 16), {"scale": -0.4}),
    "zero-scale": ((1, 40, 40, 1, 1, 16), {"scale": 0.0}),
    "window-2": ((1, 65, 65, 1, 1, 16), {"window": 2}),
    "window-50": ((1, 200, 200, 1, 1, 16), {"window": 50}),
    "window-120": ((1, 200, 200, 1, 1, 16), {"window": 120}),
    "window-beyond": ((1, 65, 65, 1, 1, 16), {"window": 65}),
    "window-tail": ((1, 63, 127, 1, 1, 16), {"window": 30, "causal": False}),
    "window-sees-nothing": ((1, 127, 40, 1, 1, 16), {"window": 20}),
    "head-of-1": ((1, 5, 5, 2, 1, 1), {}),
    "head-of-256": ((1, 33, 33, 1, 1, 256), {}),
}


@both_dtypes
@pytest.mark.parametrize("case", SHAPES)
def test_attention_matches_reference(case, dtype):
    shape, options = SHAPES[case]
    check(*shape, dtype, **options)


# (B, Tq, Tk), the longest document, options
DOCUMENTS = {
    "causal": ((2, 127, 127), 60, {}),
    "not-causal": ((2, 100, 100), 60, {"causal": False}),
    "short": ((2, 65, 65), 3, {}),
    "window": ((1, 127, 127), 60, {"window": 9}),
    "tail": ((2, 40, 100), 60, {}),
    "tail-not-causal": ((1, 40, 100), 60, {"causal": False}),
    "longer-than-tiles": ((1, 200, 200), 300, {}),
}


@both_dtypes
@pytest.mark.parametrize("case", DOCUMENTS)
def test_attention_keeps_documents_apart(case, dtype):
    (B, Tq, Tk), longest, options = DOCUMENTS[case]
    check(B, Tq, Tk, 1, 1, 16, dtype, doc_ids=docs(B, Tk, longest=longest), **options)


DROPOUT = {
    "causal": ((2, 65, 65, 2, 1, 16), {}),
    "full": ((1, 40, 100, 3, 3, 16), {"causal": False}),
    "padded-head": ((1, 65, 65, 1, 1, 80), {}),
    "window": ((1, 127, 127, 1, 1, 16), {"window": 40}),
}


@both_dtypes
@pytest.mark.parametrize("case", DROPOUT)
def test_dropout_is_that_of_the_mask(case, dtype):
    shape, options = DROPOUT[case]
    check(*shape, dtype, p=0.3, seed=-(2**40) - 3, **options)


@settings(
    max_examples=8, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(
    B=st.integers(1, 2), Tq=st.integers(1, 80), Tk=st.integers(1, 80), K=st.integers(1, 2),
    group=st.integers(1, 2), D=st.integers(1, 40), causal=st.booleans(),
    window=st.none() | st.integers(1, 120), longest=st.none() | st.integers(1, 120),
    p=st.sampled_from([0.0, 0.2, 0.9]), dtype=st.sampled_from(list(DTYPES.values())),
)  # fmt: skip
def test_attention_matches_reference_whatever_the_shape(
    B, Tq, Tk, K, group, D, causal, window, longest, p, dtype
):
    Tq = min(Tq, Tk) if longest else Tq
    doc_ids = docs(B, Tk, longest=longest) if longest else None
    options = {"causal": causal, "window": window, "doc_ids": doc_ids}
    check(B, Tq, Tk, K * group, K, D, dtype, p=p, **options)


@both_dtypes
@pytest.mark.parametrize(
    ("T", "options"),
    [(1, {}), (65, {"window": 1}), (65, {"doc_ids": torch.arange(65)[None]})],
    ids=["one-token", "window", "documents"],
)
def test_queries_that_see_one_key(T, options, dtype):
    """The weight is 1, so true gradients of q and k are 0, which no relative rule can hold."""
    q, k, v = (awkward(1, T, 2, 16, dtype=dtype).requires_grad_() for _ in "qkv")
    upstream = awkward(1, T, 2, 16, dtype=dtype)
    with launches(*KERNELS), guarded():
        out = attention(q, k, v, **options)
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), upstream)
    assert torch.equal(out, v)
    assert torch.equal(dv, upstream)
    # dP - delta cancels but for the rounding of the output
    bound = 2 * torch.finfo(dtype).eps * (upstream * v).float().abs().sum(-1).max()
    assert dq.abs().max() <= bound * k.abs().max()
    assert dk.abs().max() <= bound * q.abs().max()


def test_parity_catches_an_error_of_one_percent():
    inputs = {"q": awkward(1, 40, 2, 16), "k": awkward(1, 40, 1, 16), "v": awkward(1, 40, 1, 16)}
    assert_mutations_are_caught(attention, attention_ref, inputs)


def test_bf16_is_close_to_fp64():
    """In the interpreter bf16 is widened: what is checked is the casts around the kernels."""
    check(1, 40, 40, 2, 1, 16, torch.bfloat16, p=0.1)


# --- rows that see nothing, empty tensors, hard values --------------------------------------------


def test_a_query_that_sees_nothing_gives_zero_output_and_gradient():
    q, k, v = (awkward(1, T, 2, 16).requires_grad_() for T in (70, 20, 20))
    with launches(*KERNELS), guarded():
        out = attention(q, k, v)  # the first 50 queries stand before the first key
        upstream = torch.where(torch.arange(70)[:, None, None] < 50, 1e30, 0.0).expand_as(out)
        gradients = torch.autograd.grad(out, (q, k, v), upstream)
    assert (out[:, :50] == 0).all()
    assert (out[:, 50:] != 0).all()
    assert all((d == 0).all() for d in gradients)


@pytest.mark.parametrize(
    "shape", [(0, 5, 5, 2, 1, 8), (2, 0, 5, 2, 1, 8), (2, 5, 0, 2, 1, 8), (2, 5, 5, 0, 1, 8)],
    ids=["no-batch", "no-queries", "no-keys", "no-heads"],
)  # fmt: skip
def test_empty_tensors_give_empty_or_zero(shape):
    B, Tq, Tk, H, K, D = shape
    q, k, v = (
        torch.randn(B, T, heads, D, requires_grad=True) for T, heads in ((Tq, H), (Tk, K), (Tk, K))
    )
    with launches(), guarded():
        out = attention(q, k, v)
        gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert out.shape == q.shape
    assert all((x == 0).all() for x in (out, *gradients))


def test_large_scores_and_equal_rows():
    q, k, v = (awkward(1, 70, 1, 16) for _ in "qkv")
    check_values = {"large": (q * 1e4, k, v), "equal": (torch.ones_like(q), torch.ones_like(k), v)}
    for tensors in check_values.values():
        with launches(FWD):
            out = attention(*tensors)
        torch.testing.assert_close(out, attention_ref(*tensors), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_reaches_those_who_see_it(value):
    q, k, v = (awkward(1, 70, 1, 16) for _ in "qkv")
    v[0, 40, 0, 3] = value
    with launches(FWD):
        out = attention(q, k, v)
    assert out[0, 40:, 0, 3].isfinite().sum() == 0
    assert out[0, :, 0, :3].isfinite().all()


# --- layouts --------------------------------------------------------------------------------------


def outputs_and_gradients(op, tensors, upstream):
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = op(*leaves)
    return [out, *torch.autograd.grad(out, leaves, upstream)]


def test_strided_views_give_the_bits_of_contiguous_tensors():
    packed = awkward(1, 70, 4, 16).contiguous()
    views = packed.split((2, 1, 1), dim=2)
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in views]
    upstream = torch.randn(1, 70, 2, 16)
    expected = outputs_and_gradients(attention, [x.contiguous() for x in views], upstream)
    layouts = {
        "slices of one projection": (views, upstream),
        "heads before tokens": (heads_first, upstream),
        "gaps, misaligned": ([awkward(*x.shape).copy_(x) for x in views], upstream),
        "last dimension strided": ([x.mT.contiguous().mT for x in views], upstream),
        "transposed gradient": (views, upstream.transpose(1, 2).contiguous().transpose(1, 2)),
        "gradient with a strided last dimension": (views, upstream.mT.contiguous().mT),
    }
    for name, (tensors, gradient) in layouts.items():
        with launches(*KERNELS):
            got = outputs_and_gradients(attention, tensors, gradient)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)), name
        assert got[0].is_contiguous()


def test_expanded_tensors_and_gradients():
    one = awkward(1, 40, 1, 16)
    tensors = [one.expand(2, 40, 2, 16), one.expand(2, 40, 2, 16), awkward(2, 40, 2, 16)]
    upstream = torch.tensor(2.0).expand(2, 40, 2, 16)  # what .sum().backward() sends
    got = outputs_and_gradients(attention, tensors, upstream)
    expected = outputs_and_gradients(attention_ref, tensors, upstream)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("K", [2, 1])
@pytest.mark.parametrize(
    "options", [{}, {"dropout_p": 0.2, "dropout_seed": 3}, {"scale": -0.5}], ids=str
)
def test_packed_is_attention_of_its_slices(K, options):
    qkv = awkward(2, 40, 2 + 2 * K, 16).contiguous()
    upstream = torch.randn(2, 40, 2, 16)

    def sliced(qkv):
        return attention(*qkv.split((2, K, K), dim=2), **options)

    with launches(*KERNELS), guarded() as buffers:
        got = outputs_and_gradients(
            lambda qkv: attention_packed(qkv, 2, **options), [qkv], upstream
        )
    expected = outputs_and_gradients(sliced, [qkv], upstream)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    if "scale" not in options:  # the kernels wrote it: no concatenation made it
        assert got[1].data_ptr() in {x.data_ptr() for x in buffers}


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_heads_that_do_not_fit_the_cache_take_turns_in_groups(heads, monkeypatch):
    q, k, v = awkward(1, 70, 5, 16), awkward(1, 70, 5, 16), awkward(1, 70, 5, 16)
    upstream = awkward(1, 70, 5, 16)
    expected = outputs_and_gradients(attention, (q, k, v), upstream)
    monkeypatch.setattr(attention_launch, "L2_BYTES", heads * 2 * 70 * 16 * 4)
    assert attention_launch._together(k, 1, 5) == heads
    got = outputs_and_gradients(attention, (q, k, v), upstream)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_offsets_past_32_bits():
    """Three heads 2**30 elements apart: nearly all of the buffer is never touched."""
    far = 1 << 30
    buffer = torch.empty(2 * far + 4096, dtype=torch.float16)
    if buffer.element_size() * buffer.numel() <= 1 << 32:
        pytest.fail("the buffer is too small to show anything")
    near = [awkward(1, 40, 3, 16, dtype=torch.float16) for _ in "qkv"]
    shifts = (0, 1000, 2000)
    tensors = [buffer.as_strided((1, 40, 3, 16), (0, 16, far, 1), shift) for shift in shifts]
    for x, y in zip(tensors, near, strict=True):
        x.copy_(y)
    upstream = awkward(1, 40, 3, 16, dtype=torch.float16)
    got = outputs_and_gradients(attention, tensors, upstream)
    expected = outputs_and_gradients(attention, near, upstream)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
