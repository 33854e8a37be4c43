"""The cache of keys and values: each token computed once gives what all of them at once give."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fastgpt.cache import Cache
from fastgpt.model import GPT
from fastgpt.recipes import RECIPES
from tests.proof import launches
from tests.trainer.models import OPTIONS, build, draw_tokens, initial, on_cpu

CHUNKS = ([16], [1] * 16, [5, 1, 1, 4, 5], [15, 1])
DOCUMENTS = {"document_mask": True, "eot_id": 7}
MORE = {
    "documents": DOCUMENTS,
    "documents-window": {**DOCUMENTS, "window": 4, "position": "rotary"},
    "documents-modern": {**DOCUMENTS, **OPTIONS["modern"]},
}
each_option = pytest.mark.parametrize(
    "options", [*OPTIONS.values(), *MORE.values()], ids=[*OPTIONS, *MORE]
)


def step_by_step(model: GPT, tokens: Tensor, chunks: list[int]) -> Tensor:
    """Logits at all positions, from so many tokens at a time."""
    cache = Cache(model.config, len(tokens), sum(chunks), tokens.device)
    return torch.cat([model(part, cache=cache) for part in tokens.split(chunks, 1)], 1)


def documents(B: int = 2, T: int = 16) -> Tensor:
    tokens = draw_tokens(B, T)
    tokens[0, [3, 4, 9]] = 7
    tokens[1, [0, 15]] = 7
    return tokens


@each_option
@torch.no_grad()
def test_logits_equal_those_of_the_whole_at_every_position(options):
    model, tokens = build(**options).eval(), documents()
    expected = model(tokens)
    for chunks in CHUNKS:
        got = step_by_step(model, tokens, chunks)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", RECIPES)
@torch.no_grad()
def test_logits_of_every_recipe_equal_those_of_the_whole(name):
    """Its options at a size of two layers; the lecture's steps are models of their own."""
    config = RECIPES[name][1].model
    heads = min(4, config.num_heads)
    config = replace(
        config, num_layers=min(2, config.num_layers), num_heads=heads, dim=8 * heads,
        num_kv_heads=None if config.num_kv_heads is None else min(2, heads),
        ffn_dim=None, context=16, vocab_size=50, window=config.window and 5,
    )  # fmt: skip
    model, tokens = initial(config).eval(), draw_tokens()
    got = step_by_step(model, tokens, [5, 1, 1, 4, 5])
    torch.testing.assert_close(got, model(tokens), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [{}, OPTIONS["modern"], MORE["documents-window"], {"score_scale": "width"}],
    ids=["gpt2", "modern", "documents-window", "score-scale"],
)
@torch.no_grad()
def test_on_our_kernels_logits_are_the_same(options):
    chosen = on_cpu(decode="triton", rotary="triton")
    model, tokens = build(chosen=chosen, **options).eval(), documents()
    with launches("_decode_attention_kernel"):
        got = step_by_step(model, tokens, [5, 1, 2, 8])
    torch.testing.assert_close(got, model(tokens), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [{}, {"position": "rotary"}, DOCUMENTS],
    ids=["learned", "rotary", "documents"],
)
@torch.no_grad()
def test_rows_of_other_lengths_keep_their_own_positions(options):
    model, tokens = build(**options).eval(), documents(3)
    prompt, new = torch.tensor([7, 1, 4]), 6
    cache = Cache(model.config, 3, 7 + new, "cpu")
    model(tokens[:, :7], cache=cache)
    cache.lengths = prompt
    for step in range(new):
        positions = prompt + step
        got = model(tokens[torch.arange(3), positions][:, None], cache=cache)[:, 0]
        for row, position in enumerate(positions.tolist()):
            alone = model(tokens[row : row + 1, : position + 1])[0, -1]
            torch.testing.assert_close(got[row], alone, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_under_autocast_it_is_kept_in_its_dtype():
    model, tokens = build().eval(), draw_tokens()
    cache = Cache(model.config, 2, 16, "cpu")
    with torch.autocast("cpu", torch.bfloat16):
        got = torch.cat([model(part, cache=cache) for part in tokens.split([9, 7], 1)], 1)
        expected = model(tokens)
    kept = cache.layers[0].keys_values
    assert kept is not None
    assert [x.dtype for x in kept] == [torch.bfloat16] * 2
    assert (got - expected).norm() < 0.03 * expected.norm()


def test_a_cache_that_is_full_or_too_large_is_refused():
    model = build().eval()
    cache = Cache(model.config, 2, 10, "cpu")
    model(draw_tokens(T=8), cache=cache)
    with pytest.raises(ValueError, match=r"^tokens: expected at most 2 more, got 3$"):
        model(draw_tokens(T=3), cache=cache)
    model(draw_tokens(T=2), cache=cache)
    for size in (0, 17):
        with pytest.raises(
            ValueError, match=rf"^size: expected 1 to the context of 16, got {size}"
        ):
            Cache(model.config, 2, size, "cpu")
