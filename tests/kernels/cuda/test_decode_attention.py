"""Tests of attention over a key/value cache on a GPU; `test_conformance` has those of every op."""

import pytest
import torch

from fastgpt.kernels import decode_attention
from fastgpt.kernels.decode_attention.spec import DECODE_ATTENTION, problem
from tests.kernels import conformance
from tests.kernels.cuda.proof import captured, need, one_at_a_time

pytestmark = pytest.mark.gpu
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
REAL = {
    "gpt2-one-sequence": problem(16_384, 12, 64, (16_384,)),
    "gpt2-batch": problem(1024, 12, 64, (1024, 1000, 1, 513, 7, 64, 65, 0)),
    "grouped-128": problem(8192, 32, 128, (8192, 5000), K=8),
    "grouped-128-paged": problem(8192, 32, 128, (8192, 5000), K=8, page=16),
    "four-new-paged": problem(4096, 32, 128, (4096, 77, 1024), Tq=4, K=4, page=64),
    "d256": problem(2048, 8, 256, (2048, 99), Tq=2, K=1),
    "d80": problem(2048, 8, 80, (2048, 99), page=16),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", REAL)
def test_errors_at_real_shapes(name, dtype):
    conformance.parity(DECODE_ATTENTION, REAL[name], "cuda", DTYPES[dtype])


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


def test_a_captured_graph_serves_other_lengths():
    s = problem(2048, 8, 64, (2048,) * 3, K=2)
    inputs = conformance.make_inputs(DECODE_ATTENTION, s, "cuda", torch.bfloat16).values()
    *_, lengths = inputs
    graph, (out,) = captured(lambda: [decode_attention(*inputs)])
    for new in ([2048, 1, 0], [5, 700, 2047]):
        lengths.copy_(torch.tensor(new))
        graph.replay()
        assert torch.equal(out, decode_attention(*inputs))
