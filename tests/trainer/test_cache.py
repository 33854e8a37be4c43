"""Keys and values of the past: each token computed once gives what all of them at once give."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fastgpt import ops
from fastgpt.cache import Cache
from fastgpt.config import ModelConfig, OpsConfig
from fastgpt.generate import generate
from fastgpt.lecture import build_model
from fastgpt.model import GPT
from fastgpt.recipes import RECIPES
from tests.proof import launches
from tests.trainer.test_model import OPTIONS, build, draw_tokens

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
    """Logits of all places, from so many tokens at a time."""
    cache = Cache(model.config, len(tokens), sum(chunks), tokens.device)
    return torch.cat([model(part, cache=cache) for part in tokens.split(chunks, 1)], 1)


def documents(B: int = 2, T: int = 16) -> Tensor:
    tokens = draw_tokens(B, T)
    tokens[0, [3, 4, 9]] = 7
    tokens[1, [0, 15]] = 7
    return tokens


@each_option
@torch.no_grad()
def test_logits_equal_those_of_the_whole_at_every_place(options):
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
    model = build_model(config, ops.select(OpsConfig(), "cpu", compiled=False)).eval()
    tokens = draw_tokens()
    got = step_by_step(model, tokens, [5, 1, 1, 4, 5])
    torch.testing.assert_close(got, model(tokens), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [{}, OPTIONS["modern"], MORE["documents-window"], {"score_scale": "width"}],
    ids=["gpt2", "modern", "documents-window", "score-scale"],
)
@torch.no_grad()
def test_on_our_kernels_logits_are_the_same(options):
    asked = OpsConfig(decode="triton", rotary="triton")
    chosen = ops.select(asked, "cpu", compiled=False)
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
def test_rows_of_other_lengths_keep_their_own_places(options):
    model, tokens = build(**options).eval(), documents(3)
    prompt, new = torch.tensor([7, 1, 4]), 6
    cache = Cache(model.config, 3, 7 + new, "cpu")
    model(tokens[:, :7], cache=cache)
    cache.lengths = prompt
    for step in range(new):
        places = prompt + step
        got = model(tokens[torch.arange(3), places][:, None], cache=cache)[:, 0]
        for row, place in enumerate(places.tolist()):
            alone = model(tokens[row : row + 1, : place + 1])[0, -1]
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


# --- generate -------------------------------------------------------------------------------------


class Counted(GPT):
    """Counts the tokens that it computes."""

    computed = 0

    def forward(self, tokens: Tensor, *args, **options) -> Tensor:
        self.computed += tokens.numel()
        return super().forward(tokens, *args, **options)


def counted(**options) -> Counted:
    small = {"num_layers": 2, "num_heads": 2, "dim": 16, "context": 16, "vocab_size": 30}
    config = ModelConfig(**{**small, **options})
    model = Counted(config, ops.select(OpsConfig(), "cpu", compiled=False)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=1.0)
    return model


def greedy(model: GPT, prompt: Tensor, new: int) -> list[int]:
    """By the whole window at each step."""
    row = prompt.tolist()
    for _ in range(new):
        window = torch.tensor([row[-model.config.context :]])
        row.append(int(model(window)[0, -1].argmax()))
    return row


PROMPTS = [torch.tensor(row) for row in ([3, 1, 4, 1, 5], [9], [2, 6, 5])]
each_position = pytest.mark.parametrize("position", ["learned", "rotary", "sinusoidal", "none"])


@torch.no_grad()
def test_each_token_is_computed_once_as_long_as_the_text_fits():
    model = counted()
    options = {"vocab_size": 30, "temperature": 0}
    generate(model, torch.zeros(2, 5, dtype=torch.long), max_new_tokens=12, **options)
    assert model.computed == 2 * (5 + 11)
    generate(model, torch.zeros(2, 5, dtype=torch.long), max_new_tokens=14, **options)
    assert model.computed == 2 * (5 + 11) + 2 * (5 + 11 + 2 * 16)  # two more windows


@each_position
@torch.no_grad()
def test_prompts_of_any_lengths_continue_as_each_would_alone(position):
    model = counted(position=position)
    lengths = torch.tensor([len(prompt) for prompt in PROMPTS])
    for junk in (0, 29):  # what the rows are filled up with is not seen
        batch = torch.nn.utils.rnn.pad_sequence(PROMPTS, batch_first=True, padding_value=junk)
        for new in (1, 11, 12, 30):  # the context is 16
            got = generate(
                model, batch, lengths=lengths, max_new_tokens=new, vocab_size=30, temperature=0
            )
            assert got.shape == (3, 5 + new)
            alone = [greedy(model, prompt, new) for prompt in PROMPTS]
            for row, expected in zip(got.tolist(), alone, strict=True):
                assert row == expected + [0] * (5 + new - len(expected))
            assert len({token for row in alone for token in row}) > 6 or new == 1


@torch.no_grad()
def test_a_row_ends_with_the_stop_token_and_all_rows_end_the_work():
    model = counted()
    full = [greedy(model, prompt, 11) for prompt in PROMPTS]
    batch = torch.nn.utils.rnn.pad_sequence(PROMPTS, batch_first=True)
    lengths = torch.tensor([len(prompt) for prompt in PROMPTS])
    drawn = [set(row[len(prompt) :]) for row, prompt in zip(full, PROMPTS, strict=True)]
    for stop in sorted(set.union(*drawn)):
        model.computed = 0
        got = generate(
            model, batch, lengths=lengths, max_new_tokens=11, vocab_size=30, temperature=0,
            stop_id=stop,
        )  # fmt: skip
        steps = 0
        for row, whole, prompt in zip(got.tolist(), full, PROMPTS, strict=True):
            after = whole[len(prompt) :]
            n = after.index(stop) + 1 if stop in after else 11
            steps = max(steps, n)
            expected = whole[: len(prompt) + n]
            assert row == expected + [stop] * (16 - len(expected))
        assert model.computed == 3 * (5 + steps - 1)
