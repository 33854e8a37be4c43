"""Peak memory of a step, counted by shapes, against counts by hand and what a page says."""

from fastgpt.config.model import ModelConfig
from fastgpt.config.recipes import RECIPES
from tests.memory import memory_use
from tests.processes import ROOT


def test_whole_logits_are_kept_and_chunked_ones_are_not():
    config = ModelConfig(num_layers=1, num_heads=1, dim=64, context=128, vocab_size=6400)
    M, V, C = 4 * 128, 6400, 64
    whole, chunked = (memory_use(config, 4, loss) for loss in ("torch", "chunked"))
    assert whole.weights == chunked.weights
    # the softmax in fp32 and the weight in bf16, against the gradients of the weight and the input
    extra = whole.saved - chunked.saved
    assert extra == 4 * M * V + 2 * V * C - 4 * V * C - 2 * M * C


def test_documented_peaks_of_gpt2_124m():
    text = (ROOT / "docs" / "kernels" / "linear_cross_entropy.md").read_text()
    for loss in ("torch", "chunked"):
        found = memory_use(RECIPES["gpt2-124m"][1].model, 64, loss)
        assert f"`{loss}` {found.peak / 2**30:.1f} GiB" in text
