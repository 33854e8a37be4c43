"""FLOPs and bytes of every op, against counts by hand and torch's own counter."""

import pytest
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from bench.measure import limit
from bench.parts import limits
from fastgpt.config.recipes import RECIPES
from fastgpt.kernels.specs import SPECS


def test_attention_is_half_of_what_torch_counts_and_its_bytes_are_those_by_hand():
    shape, tensor, lse = (16, 12, 1024, 64), 2 * 16 * 12 * 1024 * 64, 4 * 16 * 12 * 1024
    work, sizes = SPECS["attention"].work, {"B": 16, "T": 1024, "H": 12, "D": 64}
    found = work(sizes, 2)
    assert found["fwd"] == (sdpa_flop_count(*[shape] * 3) / 2, 4 * tensor + lse)
    assert found["bwd"] == (sdpa_backward_flop_count(*[shape] * 4) / 2, 8 * tensor + lse)
    assert found["both"] == tuple(a + b for a, b in zip(found["fwd"], found["bwd"]))
    assert work({**sizes, "causal": False}, 2)["fwd"][0] == 2 * found["fwd"][0]
    grouped = work({**sizes, "K": 4}, 2)["fwd"][1]  # keys and values count once a group
    assert found["fwd"][1] - grouped == 2 * 16 * 1024 * 8 * 64 * 2
    cache, one = 2 * 64 * 1024 * 768 * 2, 2 * 64 * 768 * 2
    found = SPECS["decode_attention"].work({**sizes, "B": 64}, 2)
    assert found == {"fwd": (4 * 64 * 12 * 1024 * 64, cache + one)}


def test_linear_cross_entropy_by_hand():
    found = SPECS["linear_cross_entropy"].work({"M": 24, "C": 16, "V": 100}, 4)
    assert found["fwd"] == (2 * 24 * 16 * 100, 4 * (24 * 16 + 100 * 16))
    assert found["bwd"][0] == 2 * found["fwd"][0]


@pytest.mark.parametrize(
    ("op", "shape", "tensors"),  # of 10 x 8 elements, in forward, backward and both
    [
        ("layer_norm", {}, (2, 3, 5)), ("rms_norm", {}, (2, 3, 5)),
        ("add_layer_norm", {}, (4, 4, 8)), ("add_rms_norm", {}, (4, 4, 8)),
        ("cross_entropy", {"V": 8}, (1, 2, 2)), ("dropout", {}, (2, 2, 4)),
        ("bias_act", {"kind": "gelu_tanh"}, (2, 3, 5)),
        ("bias_act_swiglu", {"kind": "swiglu"}, (1.5, 2.5, 4)),
        ("rotary", {"B": 1, "T": 10, "H": 2, "D": 4}, (4, 4, 8)),
    ],
)  # fmt: skip
def test_bytes_by_hand(op, shape, tensors):
    found = SPECS[op].work({"M": 10, "N": 8, **shape}, 2)
    assert found == {name: (0, n * 160) for name, n in zip(("fwd", "bwd", "both"), tensors)}


def test_limits_of_a_step_by_hand():
    tokens, peaks = 16 * 1024, {"matmul": 1e15, "copy": 1e13}
    assert limit(1e15, 1e12, peaks) == (1.0, "matmul")
    assert limit(1e15, 2e13, peaks) == (2.0, "copy")
    found = limits(RECIPES["gpt2-124m"][1].model, tokens, 2, peaks)
    assert found["GEMM"] == pytest.approx(1e3 * 6 * 123_568_128 * tokens / 1e15)
    assert found["attention"] == pytest.approx(1e3 * 12 * 3.5 * 25_769_803_776 / 1e15)
    assert found["norm"] == pytest.approx(1e3 * (24 * 8 + 5) * tokens * 768 * 2 / 1e13)
    assert found["loss"] == pytest.approx(1e3 * 2 * tokens * 50304 * 2 / 1e13)
    assert found["host gap"] == found["data wait"] == found["other"] == 0
