import pytest

from fastgpt.config.model import ModelConfig
from fastgpt.config.recipes import RECIPES
from fastgpt.model.flops import flops_per_token


def test_gpt2_124m_is_counted_by_hand():
    qkv, out, up, down = 768 * 2304, 768 * 768, 768 * 3072, 3072 * 768
    weights = 12 * (qkv + out + up + down) + 50_304 * 768  # the head: a multiple of 64
    assert weights == 123_568_128
    # q k^T and weights x v: 2 FLOPs * 12 heads * 64 for each key, forward once and backward twice
    for_one_key = 3 * (2 + 2) * 12 * 64
    keys = sum(range(1, 1025)) / 1024  # the first token sees itself alone
    assert flops_per_token(RECIPES["gpt2-124m"][1].model) == 6 * weights + 12 * for_one_key * keys


# One layer of width 64 in 4 heads over 8 tokens; each matrix of a token costs 6 FLOPs a weight.
CASES = {
    "plain": ({}, 4 * 64 * 64 + 2 * 64 * 256, 36 / 8),
    "grouped-heads": ({"num_kv_heads": 1}, 64 * (64 + 32) + 64 * 64 + 2 * 64 * 256, 36 / 8),
    "swiglu": ({"activation": "swiglu", "ffn_dim": 100}, 4 * 64 * 64 + 3 * 64 * 100, 36 / 8),
    "window": ({"window": 3}, 4 * 64 * 64 + 2 * 64 * 256, (1 + 2 + 6 * 3) / 8),
    "window-beyond-the-context": ({"window": 99}, 4 * 64 * 64 + 2 * 64 * 256, 36 / 8),
    "untied": ({"tied": False}, 4 * 64 * 64 + 2 * 64 * 256, 36 / 8),
}


@pytest.mark.parametrize(("options", "weights", "keys"), CASES.values(), ids=CASES)
def test_flops_follow_the_shapes(options, weights, keys):
    small = {"num_layers": 1, "num_heads": 4, "dim": 64, "context": 8, "vocab_size": 100}
    config = ModelConfig(**small, **options)
    head = 128 * 64
    assert flops_per_token(config) == 6 * (weights + head) + 12 * 64 * keys
