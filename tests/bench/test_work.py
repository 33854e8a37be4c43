"""FLOPs and bytes of every op, against counts by hand and torch's own counter."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from bench.cases import cases
from bench.parts import limits
from bench.timing import limit
from fastgpt.config.model import ModelConfig
from fastgpt.config.recipes import RECIPES
from fastgpt.kernels.specs import SPECS

ATTENTION = SPECS["attention"]
A = {"B": 16, "T": 1024, "H": 12, "D": 64}


def counted(call, *inputs):
    """Returns the FLOPs of forward and backward as PyTorch's own counter counts them."""
    with FlopCounterMode(display=False) as forward:
        out = call(*inputs)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


def test_attention_is_half_of_what_torch_counts_and_its_bytes_are_those_by_hand():
    shape, tensor, lse = (16, 12, 1024, 64), 2 * 16 * 12 * 1024 * 64, 4 * 16 * 12 * 1024
    found = ATTENTION.work(A, 2)
    assert found["fwd"] == (sdpa_flop_count(*[shape] * 3) / 2, 4 * tensor + lse)
    assert found["bwd"] == (sdpa_backward_flop_count(*[shape] * 4) / 2, 8 * tensor + lse)
    assert found["both"] == tuple(a + b for a, b in zip(found["fwd"], found["bwd"]))
    assert ATTENTION.work({**A, "causal": False}, 2)["fwd"][0] == 2 * found["fwd"][0]
    grouped = ATTENTION.work({**A, "K": 4}, 2)["fwd"][1]  # keys and values count once a group
    assert ATTENTION.work({**A, "K": 12}, 2)["fwd"][1] - grouped == 2 * 16 * 1024 * 8 * 64 * 2


def test_linear_cross_entropy_is_what_torch_counts():
    x, weight = torch.randn(24, 16, requires_grad=True), torch.randn(100, 16, requires_grad=True)
    targets = torch.randint(100, (24,))
    spec = SPECS["linear_cross_entropy"]
    found = spec.work({"M": 24, "C": 16, "V": 100}, 4)
    assert counted(spec.eager, x, weight, targets) == (found["fwd"][0], found["bwd"][0])
    assert found["fwd"][0] == 2 * 24 * 16 * 100
    assert found["fwd"][1] == 4 * (24 * 16 + 100 * 16)


NORM, ROTARY = {"M": 10, "N": 8}, {"B": 1, "T": 10, "H": 2, "D": 4}


@pytest.mark.parametrize(
    ("op", "shape", "fwd", "bwd", "both"),
    [
        ("layer_norm", NORM, 2 * 160, 3 * 160, 5 * 160),
        ("rms_norm", NORM, 2 * 160, 3 * 160, 5 * 160),
        ("add_layer_norm", NORM, 4 * 160, 4 * 160, 8 * 160),
        ("add_rms_norm", NORM, 4 * 160, 4 * 160, 8 * 160),
        ("cross_entropy", {"M": 10, "V": 8}, 160, 2 * 160, 2 * 160),
        ("dropout", NORM, 2 * 160, 2 * 160, 4 * 160),
        ("bias_act", {**NORM, "kind": "gelu_tanh"}, 2 * 160, 3 * 160, 5 * 160),
        ("bias_act_swiglu", {**NORM, "kind": "swiglu"}, 160 + 80, 80 + 2 * 160, 640),
        ("rotary", ROTARY, 4 * 160, 4 * 160, 8 * 160),
    ],
)
def test_bytes_by_hand(op, shape, fwd, bwd, both):
    found = SPECS[op].work(shape, 2)
    assert found == {"fwd": (0, fwd), "bwd": (0, bwd), "both": (0, both)}


def test_decoding_reads_the_cache_once():
    found = SPECS["decode_attention"].work({"B": 64, "T": 1024, "H": 12, "D": 64}, 2)
    cache, one = 2 * 64 * 1024 * 768 * 2, 2 * 64 * 768 * 2
    assert found == {"fwd": (4 * 64 * 12 * 1024 * 64, cache + one)}


def test_every_case_has_work_for_its_passes():
    for on in ("cpu", "cuda"):
        for case in [*cases(on, full=True), *cases(on, tiny=True)]:
            found = case.work()
            assert set(case.passes) <= set(found)
            assert all(size > 0 for _, size in found.values()), case.name


def test_the_limit_is_the_slower_of_the_two():
    peaks = {"matmul": 100.0, "copy": 10.0}
    assert limit(1000, 10, peaks) == (10.0, "matmul")
    assert limit(1000, 200, peaks) == (20.0, "copy")


def test_limits_of_a_step_by_hand():
    peaks = {"matmul": 1e15, "copy": 1e13}
    tokens = 16 * 1024
    found = limits(RECIPES["gpt2-124m"][1].model, tokens, 2, peaks)
    assert found["GEMM"] == pytest.approx(1e3 * 6 * 123_568_128 * tokens / 1e15)
    assert found["attention"] == pytest.approx(1e3 * 12 * 3.5 * 25_769_803_776 / 1e15)
    rows = tokens * 768 * 2
    assert found["norm"] == pytest.approx(1e3 * (24 * 8 + 5) * rows / 1e13)
    assert found["loss"] == pytest.approx(1e3 * 2 * tokens * 50304 * 2 / 1e13)
    assert found["host gap"] == found["data wait"] == found["other"] == 0
    gated = limits(ModelConfig(activation="swiglu", vocab_size=50_257), tokens, 2, peaks)
    assert gated["GEMM"] == pytest.approx(found["GEMM"], rel=0.01)
