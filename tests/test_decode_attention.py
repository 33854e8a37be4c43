"""Attention over a cache: the reference, the kernels in Triton's interpreter, the op of torch's."""

import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck

from fastgpt.kernels import decode_attention
from fastgpt.kernels.decode_attention import device as decode_attention_launch
from fastgpt.kernels.decode_attention.device import MAX_SPLITS, splits
from fastgpt.kernels.decode_attention.op import decode_attention_ref
from tests.parity import assert_parity, awkward
from tests.proof import assert_kernel_parity, guarded, launches, mutations, printed_by

SPLIT, COMBINE = "_decode_attention_kernel", "_decode_combine_kernel"
DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
both_dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def plain(q, k, v, lengths, *, starts=None, block_table=None, scale=None) -> Tensor:
    """Sequence by sequence, by PyTorch's operations in the dtype of the inputs."""
    Tq, H, D = q.shape[1:]
    out = torch.zeros_like(q)
    for b, length in enumerate(lengths.tolist()):
        keys, values = (
            sequence(x, b, block_table)[:length].repeat_interleave(H // x.shape[2], 1)
            for x in (k, v)
        )
        for i in range(max(0, Tq - length), Tq):
            lo = 0 if starts is None else int(starts[b, i])
            seen = slice(lo, max(lo, length - Tq + i + 1))
            scores = torch.einsum("hd,jhd->hj", q[b, i], keys[seen])
            weights = (scores * (D**-0.5 if scale is None else scale)).softmax(-1)
            out[b, i] = torch.einsum("hj,jhd->hd", weights, values[seen])
    return out


def sequence(cache: Tensor, b: int, block_table: Tensor | None) -> Tensor:
    """All places (Tmax, K, D) of sequence b; pages that do not exist are any."""
    if block_table is None:
        return cache[b]
    return torch.cat([cache[min(max(i, 0), len(cache) - 1)] for i in block_table[b].tolist()])


def make(
    Tq: int, Tmax: int, H: int, K: int, D: int, lengths: list[int], *, dtype=torch.float32, page=0,
    starts=False, device="cpu", scale=None,
) -> tuple[dict[str, Tensor], dict[str, Any]]:  # fmt: skip
    """Inputs and options; whatever no query may use is NaN, or names no page."""
    B = len(lengths)
    k, v = awkward(B, Tmax, K, D, dtype=dtype), awkward(B, Tmax, K, D, dtype=dtype)
    for x in (k, v):
        for b, length in enumerate(lengths):
            x[b, length:] = torch.nan
    options: dict[str, Any] = {"scale": scale}
    if starts:
        ends = torch.tensor(lengths)[:, None] - Tq + torch.arange(Tq) + 1
        options["starts"] = (torch.rand(B, Tq) * ends.clamp(min=0)).long().to(device)
    if page:
        k, v, options["block_table"] = paged(k, v, lengths, page, device)
    inputs = {"q": awkward(B, Tq, H, D, dtype=dtype), "k_cache": k, "v_cache": v}
    inputs = {name: x.to(device) for name, x in inputs.items()}
    return {**inputs, "lengths": torch.tensor(lengths, device=device)}, options


def paged(k: Tensor, v: Tensor, lengths: list[int], page: int, device: str) -> tuple[Tensor, ...]:
    """The caches in pages of shuffled order, two of them nobody's."""
    B, Tmax, K, D = k.shape
    each = -(-Tmax // page)
    order = torch.randperm(B * each + 2)[: B * each].view(B, each)
    pages = [torch.full((B * each + 2, page, K, D), torch.nan, dtype=k.dtype) for _ in "kv"]
    for x, whole in zip(pages, (k, v), strict=True):
        filled = F.pad(whole.contiguous(), (0, 0, 0, 0, 0, each * page - Tmax), value=torch.nan)
        x[order] = filled.view(B, each, page, K, D)
    for b, length in enumerate(lengths):
        order[b, -(-length // page) :] = 10**6 * (-1) ** b  # no page, before or beyond them
    return *pages, order.to(device, torch.int32)


def check(*case, device="cpu", **options) -> None:
    """One case by the rule of errors."""
    inputs, options = make(*case, device=device, **options)
    assert_kernel_parity(
        decode_attention, decode_attention_ref, inputs, eager=plain, kernels=(SPLIT,),
        gradients=False, **options,
    )  # fmt: skip


# --- the table ------------------------------------------------------------------------------------

# Interpreted tiles are 16 rows (32 in fp16) x 16 keys; two blocks or more make a split.
# (Tq, Tmax, H, K, D, lengths)
CASES = {
    "one-place": (1, 1, 2, 2, 16, [1, 0]),
    "nothing-yet": (2, 40, 2, 1, 16, [0, 0]),
    "borders": (1, 33, 1, 1, 16, [15, 16, 17, 31, 32, 33]),
    "odd": (1, 70, 3, 3, 20, [70, 1, 37]),
    "two-new": (2, 70, 2, 2, 16, [2, 1, 65]),
    "three-new": (3, 50, 6, 2, 16, [50, 17, 2]),
    "four-new": (4, 130, 4, 1, 16, [130, 64, 3, 4]),
    "two-tiles-of-rows": (5, 70, 16, 2, 16, [70, 33, 0]),
    "splits": (1, 257, 2, 1, 16, [257, 129, 0]),
    "short-in-a-long-cache": (2, 257, 1, 1, 16, [5]),
    "head-of-64": (1, 65, 4, 2, 64, [65, 20]),
    "head-of-80": (2, 65, 1, 1, 80, [65, 16]),
    "head-of-1": (1, 20, 2, 1, 1, [20, 3]),
    "head-of-256": (1, 20, 2, 1, 256, [20]),
}


@both_dtypes
@pytest.mark.parametrize("case", CASES)
def test_decode_attention_matches_reference(case, dtype):
    for page in (0, 16, 5):
        check(*CASES[case], dtype=dtype, page=page)


@both_dtypes
@pytest.mark.parametrize("page", [0, 7], ids=["whole", "pages-of-7"])
@pytest.mark.parametrize("case", ["borders", "four-new", "splits", "two-tiles-of-rows"])
def test_nothing_before_the_start_is_seen(case, page, dtype):
    check(*CASES[case], dtype=dtype, page=page, starts=True)


@pytest.mark.parametrize("scale", [0.7, -0.4, 0.0])
def test_scale_of_any_sign(scale):
    check(*CASES["four-new"], scale=scale)


@settings(
    max_examples=15, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(data=st.data())
def test_decode_attention_matches_reference_whatever_the_shape(data):
    draw = data.draw
    Tq, Tmax, K = draw(st.integers(1, 6)), draw(st.integers(1, 150)), draw(st.integers(1, 2))
    H, D = K * draw(st.integers(1, 9)), draw(st.integers(1, 40))
    lengths = draw(st.lists(st.integers(0, Tmax), min_size=1, max_size=3))
    dtype = draw(st.sampled_from(list(DTYPES.values())))
    page, starts = draw(st.sampled_from([0, 1, 16, 33])), draw(st.booleans())
    check(Tq, Tmax, H, K, D, lengths, dtype=dtype, page=page, starts=starts)


def test_parity_catches_an_error_of_one_percent():
    inputs, _ = make(*CASES["four-new"])
    mutated = mutations(decode_attention, inputs, 1)["output 0"]
    with pytest.raises(AssertionError, match="output 0"):
        assert_parity(mutated, decode_attention_ref, inputs, eager=plain, gradients=False)


def test_bf16_is_close_to_fp64():
    """In the interpreter bf16 is widened: what is checked is the casts around the kernels."""
    check(*CASES["splits"], dtype=torch.bfloat16)


# --- splits ---------------------------------------------------------------------------------------


def test_empty_splits_are_written_and_read_by_nobody():
    inputs, _ = make(2, 257, 1, 1, 16, [37])
    with launches(SPLIT, COMBINE), guarded() as made:
        out = decode_attention(*inputs.values())
    assert out.isfinite().all()
    _, parts, lse = made
    empty = lse == -torch.inf
    assert 0 < empty.sum() < empty.numel()
    assert parts[empty].isnan().all()  # poison stayed where a split had no keys
    assert parts[~empty].isfinite().all()


@both_dtypes
@pytest.mark.parametrize("count", [1, 3, 16, 17, 33])
def test_any_number_of_splits_gives_the_same(count, dtype, monkeypatch):
    monkeypatch.setattr(decode_attention_launch, "splits", lambda *_: count)
    check(1, 257, 2, 1, 16, [257, 0], dtype=dtype, page=16 * (count % 2))


def test_splits_fill_the_gpu_and_no_more():
    slots = 264
    for tiles in (1, 12, 40, 132, 200, 264, 300, 768, 10_000):
        for keys in (0, 1, 300, 1024, 16_384, 10**6):
            count = splits(tiles, keys, 128, slots)
            most = max(1, min(MAX_SPLITS, keys // 256))
            assert 1 <= count <= most
            filled = [tiles * n / (slots * -(-tiles * n // slots)) for n in range(1, most + 1)]
            assert filled[count - 1] >= 0.9 * max(filled)
            assert all(x < 0.9 * max(filled) for x in filled[: count - 1])
    assert splits(12, 16_384, 128, slots) in range(20, 23)  # GPT-2's heads, one sequence, an H200
    assert splits(768, 16_384, 128, slots) == 1


# --- layouts and dtypes of what is given ----------------------------------------------------------


def test_strided_caches_and_other_integers_give_the_same_bits():
    inputs, _ = make(*CASES["three-new"])
    q, k, v, lengths = inputs.values()
    plain_bits = decode_attention(q.contiguous(), k.contiguous(), v.contiguous(), lengths)
    wide = torch.nan * torch.ones(3, 90, 4, 16)
    wide[:, :50, :2] = k
    others: dict[str, tuple[Tensor, Tensor, Tensor]] = {
        "heads first": (k.transpose(1, 2).contiguous().transpose(1, 2), v, lengths),
        "part of a larger cache": (wide[:, :50, :2], v, lengths),
        "last dimension strided": (k.mT.contiguous().mT, v.mT.contiguous().mT, lengths),
        "int32": (k, v, lengths.int()),
        "strided lengths": (k, v, torch.stack((lengths, lengths), 1)[:, 0]),
    }
    for name, tensors in others.items():
        assert torch.equal(decode_attention(q, *tensors), plain_bits), name


def test_lengths_beyond_the_cache_are_cut():
    q, k, v, _ = make(1, 20, 2, 1, 16, [20, 20])[0].values()
    expected = decode_attention(q, k, v, torch.tensor([20, 0]))
    with guarded():
        got = decode_attention(q, k, v, torch.tensor([2**40, -(2**40)]))
    assert torch.equal(got, expected)
    assert torch.equal(decode_attention_ref(q, k, v, torch.tensor([99, -99])), 
                       decode_attention_ref(q, k, v, torch.tensor([20, 0])))  # fmt: skip


@pytest.mark.parametrize(
    ("q", "cache", "table"),
    [((0, 1, 2, 8), (0, 5, 1, 8), None), ((2, 0, 2, 8), (2, 5, 1, 8), None),
     ((2, 1, 0, 8), (2, 5, 1, 8), None), ((2, 1, 2, 8), (2, 0, 1, 8), None),
     ((2, 1, 2, 8), (0, 4, 1, 8), 3), ((2, 1, 2, 8), (4, 4, 1, 8), 0)],
    ids=["no-batch", "no-queries", "no-heads", "no-places", "no-pages", "no-table"],
)  # fmt: skip
def test_empty_tensors_give_empty_or_zero(q, cache, table):
    tables = None if table is None else torch.zeros(2, table, dtype=torch.int32)
    inputs = (torch.randn(q), torch.randn(cache), torch.randn(cache), torch.full(q[:1], 3))
    with launches():
        out = decode_attention(*inputs, block_table=tables)
    assert out.shape == q
    assert (out == 0).all()
    assert torch.equal(out, decode_attention_ref(*inputs, block_table=tables))


def test_offsets_past_32_bits():
    """Two sequences 2**30 elements apart, and pages as far: most of the buffer is never touched."""
    far = 1 << 30
    buffer = torch.empty(2 * far + 4096, dtype=torch.float16)
    inputs, _ = make(1, 40, 1, 1, 16, [40, 33, 9], dtype=torch.float16)
    q, k, v, lengths = inputs.values()
    distant = [buffer.as_strided(k.shape, (far, 16, 16, 1), shift) for shift in (0, 2000)]
    for x, y in zip(distant, (k, v), strict=True):
        x.copy_(y)
    expected = decode_attention(q, k, v, lengths)
    k, v = distant
    assert torch.equal(decode_attention(q, k, v, lengths), expected)
    table = torch.arange(3, dtype=torch.int32)[:, None]
    assert torch.equal(decode_attention(q, k, v, lengths, block_table=table), expected)


def test_autocast_casts_to_its_dtype():
    inputs, _ = make(*CASES["three-new"])
    with torch.autocast("cpu", dtype=torch.bfloat16), launches(SPLIT):
        out = decode_attention(*inputs.values())
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out.float(), plain(*inputs.values()), rtol=0.02, atol=0.02)


# --- the reference --------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize("case", CASES)
def test_reference_is_pytorchs_attention_of_each_sequence(case, page):
    Tq, _, H, K, _, lengths = CASES[case]
    inputs, options = make(*CASES[case], dtype=torch.float64, page=page)
    got = decode_attention_ref(*inputs.values(), **options)
    torch.testing.assert_close(got, plain(*inputs.values(), **options))
    if page:
        return
    for b, length in enumerate(lengths):
        new = min(Tq, length)
        assert (got[b, : Tq - new] == 0).all()
        q, k, v = (x.transpose(0, 1)[None] for x in (
            inputs["q"][b, Tq - new :], inputs["k_cache"][b, :length], inputs["v_cache"][b, :length]
        ))  # fmt: skip
        mask = torch.ones(new, length, dtype=torch.bool).tril(length - new)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=H != K)
        torch.testing.assert_close(got[b, Tq - new :], out[0].transpose(0, 1))


def test_without_kernels_the_reference_runs(monkeypatch):
    module = sys.modules["fastgpt.kernels.decode_attention.op"]
    monkeypatch.setattr(module, "runs_kernels", lambda device: False)
    inputs, options = make(*CASES["four-new"], page=5, starts=True)
    with launches():
        got = decode_attention(*inputs.values(), **options)
    assert torch.equal(got, decode_attention_ref(*inputs.values(), **options))


# --- the op ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("page", "dtype"), [(0, torch.float32), (16, torch.float16)], ids=str)
def test_opcheck(page, dtype):
    inputs, options = make(2, 20, 2, 1, 8, [20, 3], dtype=dtype, page=page, starts=True)
    inputs = {name: x.nan_to_num() if x.is_floating_point() else x for name, x in inputs.items()}
    table = options.get("block_table")
    opcheck(
        torch.ops.fastgpt.decode_attention.default,
        (*inputs.values(), options["starts"], table, 0.25),
    )


def test_compiles_to_one_graph_for_all_lengths_and_shapes():
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(decode_attention, fullgraph=True, dynamic=True, backend=counter)
    shapes = ((1, 70, [70, 3, 9]), (1, 70, [5, 6, 0]), (1, 99, [99, 1, 2, 3, 50]), (2, 33, [7, 33]))
    for Tq, Tmax, lengths in shapes:
        inputs, _ = make(Tq, Tmax, 8, 4, 10, lengths)
        with launches(SPLIT):
            got = compiled(*inputs.values())
        assert torch.equal(got, decode_attention(*inputs.values()))
        # one new token is a size of its own to dynamo
        assert counter.frame_count == 1 + (Tq > 1)


def test_a_gradient_is_refused_before_anything_runs():
    inputs, _ = make(*CASES["three-new"])
    for name in ("q", "k_cache", "v_cache"):
        leaf = {**inputs, name: inputs[name].detach().requires_grad_()}
        with launches(), pytest.raises(ValueError, match=rf"^{name}: .* has no backward$"):
            decode_attention(*leaf.values())
        with torch.no_grad():
            decode_attention(*leaf.values())
    q = inputs["q"].detach().requires_grad_()
    rest = list(inputs.values())[1:]
    out = torch.ops.fastgpt.decode_attention(q, *rest, None, None, 1.0)
    with pytest.raises(NotImplementedError, match="cannot be differentiated"):
        out.sum().backward()


SPECIALISATIONS = """
import torch
from fastgpt.kernels.proof.compile import specialised
from fastgpt.kernels.decode_attention.device import decode_attention_fwd
from fastgpt.kernels.runtime import recording

seen = {}
for B, Tq, T in ((1, 1, 4096), (1, 2, 4097), (2, 1, 5000), (3, 16, 16_384), (4, 1, 70_001)):
    q = torch.empty(B, Tq, 12, 64, dtype=torch.bfloat16, device="meta")
    k = torch.empty(B, T, 12, 64, dtype=torch.bfloat16, device="meta")
    lengths = torch.empty(B, dtype=torch.int64, device="meta")
    with recording(90) as launches:
        decode_attention_fwd(q, k, k, lengths, None, None, 0.125)
    for launch in launches:
        seen.setdefault(launch.kernel.__name__, set()).add(repr(specialised(launch)))
print({name: len(forms) for name, forms in sorted(seen.items())})
"""


def test_batch_and_length_compile_nothing_anew():
    assert printed_by(SPECIALISATIONS) == repr({SPLIT: 1, COMBINE: 1}) + "\n"


# --- what it refuses ------------------------------------------------------------------------------

q0, c0, n0 = torch.zeros(2, 1, 4, 8), torch.zeros(2, 6, 2, 8), torch.ones(2, dtype=torch.int64)
t0 = torch.zeros(2, 3, dtype=torch.int32)
REFUSED = {
    "q: expected (B, Tq, H, D) with D from 1 to 256, got (1, 4, 8)": (q0[0], c0, c0, n0, {}),
    "q: expected (B, Tq, H, D) with D from 1 to 256, got (1, 1, 1, 257)": (
        torch.zeros(1, 1, 1, 257), c0, c0, n0, {}),
    "k_cache: expected (2, Tmax, K, 8) for q (2, 1, 4, 8), the same for k_cache and v_cache, got "
    "(1, 6, 2, 8)": (q0, c0[:1], c0, n0, {}),
    "v_cache: expected (2, Tmax, K, 8)": (q0, c0, c0[:, :5], n0, {}),
    "k_cache: expected (pages, page, K, 8)": (q0, c0[0], c0, n0, {"block_table": t0}),
    "k_cache: expected torch.float32 on cpu as q, got torch.float16": (q0, c0.half(), c0, n0, {}),
    "q: expected a number of heads that 3 divides, got 4": (
        q0, *[torch.zeros(2, 6, 3, 8)] * 2, n0, {}),
    "q: expected fp32, fp16 or bf16, got torch.float64": (
        q0.double(), c0.double(), c0.double(), n0, {}),
    "lengths: expected (2,), got (3,)": (q0, c0, c0, torch.ones(3).long(), {}),
    "lengths: expected torch.int32 or torch.int64, got torch.float32": (
        q0, c0, c0, torch.ones(2), {}),
    "lengths: expected cpu as q, got meta": (q0, c0, c0, n0.to("meta"), {}),
    "starts: expected (2, 1), got (2,)": (q0, c0, c0, n0, {"starts": n0}),
    "block_table: expected (2, max_pages), got (2,)": (q0, c0, c0, n0, {"block_table": n0.int()}),
    "block_table: expected (2, 3), got (3, 3)": (
        q0, c0, c0, n0, {"block_table": torch.zeros(3, 3).int()}),
    "block_table: expected torch.int32, got torch.int64": (
        q0, c0, c0, n0, {"block_table": t0.long()}),
    "scale: expected a finite number, got inf": (q0, c0, c0, n0, {"scale": float("inf")}),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_bad_arguments_are_named_before_anything_runs(message):
    q, k, v, lengths, options = REFUSED[message]
    with launches(), pytest.raises(ValueError) as caught:  # noqa: PT011 - compared whole below
        decode_attention(q, k, v, lengths, **options)
    assert str(caught.value).startswith(message)
