"""Graphs of torch.compile: opaque ops, and merged launches that give the same gradients."""

import re
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
from torch._inductor.utils import run_and_get_code
from torch.fx import GraphModule
from torch.nn.functional import embedding

from fastgpt.config.config import OpsConfig
from fastgpt.config.model import ModelConfig
from fastgpt.device.device import compile_options
from fastgpt.kernels import (
    add_layer_norm,
    attention_packed,
    bias_act,
    cross_entropy,
    layer_norm,
    linear_cross_entropy,
)
from fastgpt.kernels.graphs import Merged
from fastgpt.kernels.rows import MOST
from fastgpt.kernels.runtime import LAUNCHES
from fastgpt.model.gpt import GPT
from fastgpt.ops.tables import select
from tests.parity import awkward, forward_backward

aten = torch.ops.aten


def test_inductor_sees_opaque_ops_and_no_fp64():
    """It calls the ops by name, with their floats as literals, and generates no code of ours."""
    targets = torch.tensor([1, 2, 3, 4])

    def f(qkv, x, weight, bias):
        y = attention_packed(qkv, 2, scale=0.3).tanh() * 0.7
        x = bias_act(layer_norm(x, weight, bias, 1e-5), bias, "gelu_tanh")
        return cross_entropy(x * 1.1, targets, z_loss=0.1, softcap=20.0) + y.sum()

    torch.compiler.reset()
    inputs = [awkward(1, 8, 4, 16), awkward(4, 32), awkward(32), awkward(32)]
    compiled = torch.compile(f, fullgraph=True)
    got, codes = run_and_get_code(forward_backward, compiled, inputs)
    torch.testing.assert_close(got, forward_backward(f, inputs), rtol=1e-5, atol=1e-5)
    code = "\n".join(codes)
    called = set(re.findall(r"torch\.ops\.fastgpt\w*\.(\w+)", code))
    assert len([name for name in called if "fwd" in name]) == 4, called
    assert not re.search("float64|fp64|_attention_fwd_kernel", code)


def gradients(loss, given, merged: bool) -> tuple[list[Tensor], list[str]]:
    """Returns the gradients of a compiled loss, and the names of what its backward calls."""
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
    found = list(torch.autograd.grad(compiled(*given), given))
    return found, [str(node.target) for node in graphs[-1].graph.nodes]


def parameters(*shapes):
    return [torch.randn(*shape, requires_grad=True) for shape in shapes]


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
    together, called = gradients(loss, given, merged=True)
    launches = -(-2 * layers // MOST)
    assert LAUNCHES["_reduce_partials_kernel"] == launches
    assert called.count("fastgpt.reduce_partials.default") == launches
    assert all(map(torch.equal, together, one_by_one))


class Sums(torch.autograd.Function):
    """Stands for a network in whose backward a bias's gradient goes on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:  # pyright: ignore
        return x * bias

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore
        first = torch.ops.fastgpt.reduce_partials(dy, [])
        return dy * first, torch.ops.fastgpt.reduce_partials(dy + first, [])


def test_a_sum_that_the_next_one_needs_is_apart():
    given = parameters((6, 24), (24,))

    def loss(x: Tensor, bias: Tensor) -> Tensor:
        return Sums.apply(x, bias).square().sum()  # pyright: ignore

    one_by_one, _ = gradients(loss, given, merged=False)
    together, called = gradients(loss, given, merged=True)
    assert called.count("fastgpt.reduce_partials.default") == 2
    assert all(map(torch.equal, together, one_by_one))


@pytest.mark.parametrize("kind", ["tied", "untied", "twice"])
def test_rows_of_the_embedding_are_added_to_the_gradient_of_the_head(kind):
    given = parameters(*[(11, 8)] * (2 if kind == "untied" else 1))
    tokens = torch.tensor([[1, 3, 3], [0, 10, 3]])

    def loss(table: Tensor, head: Tensor | None = None) -> Tensor:
        if kind == "twice":  # rows alone
            return (embedding(tokens, table) + embedding(tokens, table)).square().sum()
        x = layer_norm(embedding(tokens, table), None)
        return (x @ (table if head is None else head).t()).logsumexp(-1).sum()

    apart, before = gradients(loss, given, merged=False)
    together, after = gradients(loss, given, merged=True)
    torch.testing.assert_close(together, apart)
    less = [before.count(op) - after.count(op) for op in ("aten.full.default", "aten.add.Tensor")]
    assert kind == "twice" or less == ([1, 1] if kind == "tied" else [0, 0])


def test_blocks_share_a_graph():
    """Compilers that differed would compile each block apart, up to PyTorch's limit of 8."""
    one, other = (
        _TorchCompileInductorWrapper("default", compile_options("cuda", "on"), dynamic=False)
        for _ in range(2)
    )
    assert "post_grad_custom_post_pass" in one.config
    assert one == other


def test_scaling_of_the_heads_gradients_is_left_to_the_compiler():
    given, targets = parameters((6, 8), (5, 8)), torch.randint(5, (6,))

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        return 3 * linear_cross_entropy(x, weight, targets)

    found, called = gradients(loss, given, merged=False)
    torch.testing.assert_close(found, list(torch.autograd.grad(loss(*given), given)))
    assert "aten.mul.Tensor" in called
    assert not [name for name in called if "linear_cross_entropy" in name]


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
