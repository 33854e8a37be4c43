"""What only a GPU shows of attention over a cache: `make parity` runs it."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from torch.library import opcheck

from fastgpt.kernels import decode_attention
from fastgpt.kernels.decode_attention import device as decode_attention_launch
from fastgpt.kernels.decode_attention.op import decode_attention_ref
from tests.cuda_proof import (
    assert_nothing_waits,
    assert_on_the_current_stream,
    captured,
    need,
    one_at_a_time,
)
from tests.parity import assert_parity
from tests.proof import launches
from tests.test_decode_attention import CASES, COMBINE, SPLIT, check, make, plain

pytestmark = pytest.mark.gpu
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
all_dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


@pytest.fixture(autouse=True)
def products_in_fp32(monkeypatch):
    """What the kernels are compared with must not multiply in tf32."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


def caches(B, Tq, Tmax, H, K, D, dtype=torch.bfloat16, lengths=None):
    q = torch.randn(B, Tq, H, D, device="cuda", dtype=dtype)
    k, v = (torch.randn(B, Tmax, K, D, device="cuda", dtype=dtype) for _ in "kv")
    lengths = [Tmax] * B if lengths is None else lengths
    return q, k, v, torch.tensor(lengths, device="cuda")


# --- the rule of errors ---------------------------------------------------------------------------


@all_dtypes
@pytest.mark.parametrize("case", CASES)
def test_decode_attention_matches_reference(case, dtype):
    for page in (0, 16, 5):
        check(*CASES[case], dtype=dtype, page=page, device="cuda")


@all_dtypes
@pytest.mark.parametrize("case", ["borders", "four-new", "splits", "two-tiles-of-rows"])
def test_nothing_before_the_start_is_seen(case, dtype):
    for page in (0, 7):
        check(*CASES[case], dtype=dtype, page=page, starts=True, device="cuda")


@pytest.mark.parametrize("count", [1, 3, 16, 17, 128])
def test_any_number_of_splits_gives_the_same(count, monkeypatch):
    monkeypatch.setattr(decode_attention_launch, "splits", lambda *_: count)
    check(2, 4000, 12, 4, 64, [4000, 1000, 1, 0], dtype=torch.bfloat16, device="cuda")


# (Tq, Tmax, H, K, D, lengths), page
REAL = {
    "gpt2-one-sequence": ((1, 16_384, 12, 12, 64, [16_384]), 0),
    "gpt2-batch": ((1, 1024, 12, 12, 64, [1024, 1000, 1, 513, 7, 64, 65, 0]), 0),
    "grouped-128": ((1, 8192, 32, 8, 128, [8192, 5000]), 0),
    "grouped-128-paged": ((1, 8192, 32, 8, 128, [8192, 5000]), 16),
    "four-new-paged": ((4, 4096, 32, 4, 128, [4096, 77, 1024]), 64),
    "d256": ((2, 2048, 8, 1, 256, [2048, 99]), 0),
    "d80": ((1, 2048, 8, 8, 80, [2048, 99]), 16),
}


@all_dtypes
@pytest.mark.parametrize("name", REAL)
def test_decode_attention_at_real_shapes(name, dtype):
    case, page = REAL[name]
    inputs, options = make(*case, dtype=dtype, page=page, device="cuda")
    truth = torch.float64 if dtype is torch.float32 else torch.float32
    with launches(SPLIT):
        assert_parity(
            decode_attention, decode_attention_ref, inputs, eager=plain, truth_dtype=truth,
            gradients=False, **options,
        )  # fmt: skip


def test_agrees_with_pytorchs_fused_attention():
    q, k, v, lengths = caches(1, 1, 16_384, 12, 12, 64)
    with launches(SPLIT, COMBINE):
        got = decode_attention(q, k, v, lengths)
    expected = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
    assert (got - expected.transpose(1, 2)).norm() <= 1e-2 * expected.norm()


# --- bits -----------------------------------------------------------------------------------------


def test_a_thousand_runs_give_the_same_bits():
    inputs = caches(2, 2, 4096, 8, 2, 128, lengths=[4096, 777])
    with launches(SPLIT, COMBINE):
        first = decode_attention(*inputs)
    same = torch.ones((), dtype=torch.bool, device="cuda")
    for _ in range(1000):
        same &= (decode_attention(*inputs) == first).all()
    assert same


@one_at_a_time
def test_more_than_2_to_the_31_elements():
    B, Tmax, D = 2, 1 << 24, 128  # 2**32 elements in each cache
    need(24)
    k, v = (torch.zeros(B, Tmax, 1, D, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    q = torch.randn(B, 1, 2, D, device="cuda", dtype=torch.bfloat16)
    tail = slice(Tmax - 300, Tmax)
    for x in (k, v):
        x[:, tail] = torch.randn(B, 300, 1, D, device="cuda", dtype=torch.bfloat16)
    lengths = torch.full((B,), Tmax, device="cuda")
    starts = lengths[:, None] - 300
    expected = decode_attention(q, k[:, tail], v[:, tail], lengths * 0 + 300)
    got = decode_attention(q, k, v, lengths, starts=starts)
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
    table = torch.arange(B * Tmax // 64, device="cuda", dtype=torch.int32).view(B, -1)
    pages = (x.view(-1, 64, 1, D) for x in (k, v))
    got = decode_attention(q, *pages, lengths, starts=starts, block_table=table)
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


# --- the device -----------------------------------------------------------------------------------


def test_waits_for_nothing():
    inputs = caches(2, 1, 4096, 8, 2, 64)
    assert_nothing_waits(lambda: decode_attention(*inputs), SPLIT)


def test_a_captured_graph_serves_other_lengths():
    q, k, v, lengths = caches(3, 1, 2048, 8, 2, 64)
    graph, (out,) = captured(lambda: [decode_attention(q, k, v, lengths)])
    for new in ([2048, 1, 0], [5, 700, 2047]):
        lengths.copy_(torch.tensor(new))
        q.copy_(torch.randn_like(q))
        graph.replay()
        assert torch.equal(out, decode_attention(q, k, v, lengths))


def test_runs_on_the_current_stream():
    inputs = caches(2, 1, 4096, 8, 2, 64)
    assert_on_the_current_stream(lambda: [decode_attention(*inputs)], inputs[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_opcheck(dtype):
    inputs = caches(2, 2, 300, 4, 2, 64, dtype, lengths=[300, 5])
    opcheck(torch.ops.fastgpt.decode_attention.default, (*inputs, None, None, 0.125))


@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_gives_the_bits_of_eager(dynamic):
    torch.compiler.reset()
    compiled = torch.compile(decode_attention, fullgraph=True, dynamic=dynamic)
    for B, Tmax in ((2, 1027), (3, 2093)):
        inputs = caches(B, 1, Tmax, 8, 4, 64, lengths=[Tmax, *range(1, B)])
        with launches(SPLIT):
            assert torch.equal(compiled(*inputs), decode_attention(*inputs))
