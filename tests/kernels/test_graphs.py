"""The pass over torch.compile's graphs: merged launches are fewer and give the same gradients."""

import time
from typing import Any

import pytest
import torch
from torch import Tensor, _TorchCompileInductorWrapper
from torch._dynamo.backends.common import aot_autograd
from torch._inductor import config as inductor
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.lowering import lowerings
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.fx import GraphModule
from torch.nn.functional import embedding

from fastgpt.config.config import OpsConfig
from fastgpt.config.model import ModelConfig
from fastgpt.device.device import compile_options
from fastgpt.kernels import add_layer_norm, bias_act, layer_norm
from fastgpt.kernels.graphs import Merged
from fastgpt.kernels.rows import MOST
from fastgpt.kernels.runtime import LAUNCHES
from fastgpt.model.gpt import GPT
from fastgpt.ops.tables import select

aten = torch.ops.aten


def gradients(loss, given, merged: bool) -> tuple[list[Tensor], GraphModule]:
    """Returns the gradients of a compiled loss and the graph of its backward."""
    graphs = []

    def backward(graph: GraphModule, _: list[Tensor]) -> GraphModule:
        if merged:
            Merged()(graph.graph)
            stable_topological_sort(graph.graph)  # as Inductor does after our pass
            graph.graph.eliminate_dead_code()
            graph.graph.lint()
            graph.recompile()
        graphs.append(graph)
        return graph

    compiler = aot_autograd(
        fw_compiler=lambda graph, _: graph,
        bw_compiler=backward,
        decompositions=select_decomp_table(),
    )
    torch._dynamo.reset()
    compiled = torch.compile(loss, backend=compiler, fullgraph=True)
    return list(torch.autograd.grad(compiled(*given), given)), graphs[-1]


def parameters(*shapes):
    torch.manual_seed(0)
    return [torch.randn(*shape, requires_grad=True) for shape in shapes]


def targets_of(graph: GraphModule) -> list[object]:
    return [node.target for node in graph.graph.nodes]


@pytest.mark.parametrize("layers", [1, MOST // 2, MOST + 1])
def test_one_launch_sums_what_several_backwards_left(layers):
    given = parameters((6, 24), *[(24,)] * (3 * layers))

    def loss(x: Tensor, *vectors: Tensor) -> Tensor:
        total = x
        for weight, bias, of_activation in zip(*[iter(vectors)] * 3, strict=True):
            y, total = add_layer_norm(x, total, weight, bias)
            x = bias_act(y, of_activation, "gelu_tanh")
        return x.square().sum()

    one_by_one, _ = gradients(loss, given, merged=False)
    LAUNCHES.clear()
    together, graph = gradients(loss, given, merged=True)
    launches = -(-2 * layers // MOST)
    assert LAUNCHES["_reduce_partials_kernel"] == launches
    assert targets_of(graph).count(torch.ops.fastgpt.reduce_partials.default) == launches
    for got, expected in zip(together, one_by_one, strict=True):
        assert torch.equal(got, expected)


def test_a_sum_that_the_next_one_needs_is_apart():
    given = parameters((6, 24), (24,))

    class Sums(torch.autograd.Function):
        """Stands for a network in whose backward a bias's gradient goes on."""

        @staticmethod
        def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:  # pyright: ignore
            return x * bias

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore
            first = torch.ops.fastgpt.reduce_partials(dy, [])
            return dy * first, torch.ops.fastgpt.reduce_partials(dy + first, [])

    def loss(x: Tensor, bias: Tensor) -> Tensor:
        return Sums.apply(x, bias).square().sum()  # pyright: ignore

    one_by_one, _ = gradients(loss, given, merged=False)
    together, graph = gradients(loss, given, merged=True)
    assert targets_of(graph).count(torch.ops.fastgpt.reduce_partials.default) == 2
    for got, expected in zip(together, one_by_one, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("tied", [True, False])
def test_rows_of_the_embedding_are_added_to_the_gradient_of_the_head(tied):
    given = parameters((11, 8), (11, 8))[: 1 if tied else 2]
    tokens = torch.tensor([[1, 3, 3], [0, 10, 3]])

    def loss(table: Tensor, head: Tensor | None = None) -> Tensor:
        x = layer_norm(embedding(tokens, table), None)
        return (x @ (table if head is None else head).t()).logsumexp(-1).sum()

    apart, before = gradients(loss, given, merged=False)
    together, after = gradients(loss, given, merged=True)
    torch.testing.assert_close(together, apart)
    zeros = [targets_of(graph).count(aten.full.default) for graph in (before, after)]
    adds = [targets_of(graph).count(aten.add.Tensor) for graph in (before, after)]
    assert (zeros[0] - zeros[1], adds[0] - adds[1]) == ((1, 1) if tied else (0, 0))


def test_blocks_share_a_graph():
    """Compilers that differed would compile each block apart, up to PyTorch's limit of 8."""
    one, other = (
        _TorchCompileInductorWrapper("default", compile_options("cuda", "on"), dynamic=False)
        for _ in range(2)
    )
    assert "post_grad_custom_post_pass" in one.config
    assert one == other


def test_a_gradient_of_rows_alone_stays_right():
    tokens = torch.tensor([[1, 3, 3], [0, 10, 3]])

    def loss(table: Tensor) -> Tensor:
        return (embedding(tokens, table) + embedding(tokens, table)).square().sum()

    given = parameters((11, 8))
    apart, together = (gradients(loss, given, merged=merged)[0] for merged in (False, True))
    torch.testing.assert_close(together, apart)


@pytest.mark.slow
def test_the_time_to_compile_a_model_grows_with_its_layers_and_no_faster(monkeypatch):
    """PyTorch 2.11 alone takes minutes for 6 layers; the CI job of the versions runs this.

    It formats a message only when a process meets an op for the first time, so each depth must.
    """
    ops = OpsConfig(attention="triton", loss="chunked", kernels="triton")
    x, seconds = torch.randint(32, (2, 8)), {}
    for layers in (1, 2, 4, 8, 12):  # the first one imports the compiler
        torch.compiler.reset()
        for op in [op for op in lowerings if str(op).startswith("fastgpt.")]:
            monkeypatch.delitem(lowerings, op)
        sizes = ModelConfig(num_layers=layers, num_heads=1, dim=16, context=8, vocab_size=32)
        model = GPT(sizes, select(ops, "cpu"))
        start = time.process_time()
        with inductor.patch(force_disable_caches=True, compile_threads=1):
            loss = torch.compile(model, fullgraph=True)(x, x)
            loss.backward()
        seconds[layers] = time.process_time() - start
        assert layers <= 2 or seconds[layers] < 3.5 * seconds[layers - 4 or 2], seconds
        torch.testing.assert_close(loss, model(x, x))
    assert seconds[8] < 60
    assert seconds[12] < 5 * seconds[4]
