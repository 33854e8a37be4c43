"""Chunks of tokens of the head, and what becomes of its gradients when it is compiled."""

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule

from fastgpt.kernels import linear_cross_entropy
from fastgpt.kernels.cross_entropy.chunks import TILE, chunk_on_gpu, rounds, tokens_at_a_time
from fastgpt.kernels.runtime import recording

V, C = 50_304, 768


@pytest.mark.parametrize(
    ("M", "asked", "columns", "tokens"),
    [(4096, 0, V, 256), (300, 0, V, 256), (4096, 77, V, 77), (4096, 0, 10**9, 1)],
)
def test_chunks_on_a_cpu_follow_from_a_budget(M, asked, columns, tokens):
    x, weight = (torch.empty(1, C).expand(rows, C) for rows in (M, columns))
    assert tokens_at_a_time(x, weight, asked) == tokens


@pytest.mark.parametrize(
    ("M", "most", "processors", "tokens"),
    [
        (65_536, 16_862, 132, 16_768),  # H100, bf16
        (16_384, 16_862, 132, 16_384),
        (65_536, 5760, 132, 5632),  # 132 tiles of x's gradient, where 4096 tokens have 96
        (5000, 5760, 132, 5120),
        (100, 5760, 132, 128),
    ],
)
def test_chunks_on_a_gpu_fill_its_multiprocessors(M, most, processors, tokens):
    assert chunk_on_gpu(M, V, C, most, processors) == tokens


@pytest.mark.parametrize(("columns", "tokens"), [(V, 16_384), (10**9, 1)])
def test_chunks_on_a_gpu_take_a_share_of_its_memory(columns, tokens):
    with recording(90), FakeTensorMode():  # as if on an H100
        x = torch.empty(16_384, C, dtype=torch.bfloat16, device="cuda")
        weight = torch.empty(columns, C, device="cuda")
        assert tokens_at_a_time(x, weight, 0) == tokens


def test_rounds_count_the_waves_of_three_products():
    # 4 x 1, 4 x 2 and 1 x 2 tiles of 128 x 256 on 4 multiprocessors; then half as many rows
    assert rounds(512, 512, 256, 512, processors=4) == 1 * 512 + 2 * 256 + 1 * 512
    assert rounds(768, 512, 256, 512, processors=4) == 1536 + 1 * 512 + 1 * 256 + 1 * 256


@pytest.mark.parametrize(("tokens", "share"), [(4096, 0.885), (5632, 0.985), (16_768, 0.986)])
def test_the_share_of_busy_multiprocessors_is_that_of_the_docs(tokens, share):
    M, processors = 65_536, 132
    tiles = 3 * M * V * C / (TILE[0] * TILE[1])  # of one multiply-add along their sums
    assert tiles / processors / rounds(M, tokens, V, C, processors) == pytest.approx(
        share, abs=5e-4
    )


def test_compiled_scaling_of_the_gradients_is_left_to_the_compiler():
    ops = []

    def backward(graph: GraphModule, _: list[Tensor]) -> GraphModule:
        ops.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    def loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return 3 * linear_cross_entropy(x, weight, targets)

    given = [torch.randn(n, 8, requires_grad=True) for n in (6, 5)]
    targets = torch.randint(5, (6,))
    compiler = aot_autograd(fw_compiler=lambda graph, _: graph, bw_compiler=backward)
    compiled = torch.compile(loss, backend=compiler, fullgraph=True)
    found, expected = (torch.autograd.grad(f(*given, targets), given) for f in (compiled, loss))
    torch.testing.assert_close(found, expected)
    assert "aten.mul.Tensor" in ops
    assert not [op for op in ops if "linear_cross_entropy" in op]
