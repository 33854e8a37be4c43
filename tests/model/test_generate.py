import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import fastgpt
from fastgpt.config.config import OpsConfig
from fastgpt.config.model import ModelConfig
from fastgpt.config.recipes import RECIPES
from fastgpt.data.tokenizers import IdTokenizer
from fastgpt.errors import UserError
from fastgpt.kernels.decode_attention import op as decode_attention_op
from fastgpt.model.generation import generate
from fastgpt.model.gpt import GPT
from fastgpt.ops import tables
from fastgpt.ops.kv_cache import Cache
from tests.models import OPTIONS, build, draw_tokens, greedy, sharp, shrunk
from tests.parity import launches

PROMPTS = [torch.tensor(row) for row in ([3, 1, 4, 1, 5], [9], [2, 6, 5])]
PADDED = pad_sequence(PROMPTS, batch_first=True)
GREEDY = {"lengths": torch.tensor([5, 1, 3]), "vocab_size": 30, "temperature": 0}


def sharp_model(**options) -> GPT:
    return sharp(num_heads=2, dim=16, vocab_size=30, **options)


class Bigram(nn.Module):
    """A fake network whose logits follow from the last token alone."""

    def __init__(self, logits: list[list[float]]) -> None:
        super().__init__()
        self.table = torch.tensor(logits)
        self.config = ModelConfig(num_heads=1, dim=1, context=4, vocab_size=len(logits))

    def forward(self, tokens: Tensor, last: Tensor | None = None, **_: Cache) -> Tensor:
        return self.table[tokens if last is None else tokens.gather(1, last[:, None])]


def draws(probabilities: list[float], n: int = 2000, **options) -> Tensor:
    model = Bigram([torch.tensor(probabilities).log().tolist()] * len(probabilities))
    options = {"vocab_size": len(probabilities), **options}
    tokens = generate(model, torch.zeros(n, 1, dtype=torch.long), max_new_tokens=1, **options)
    return torch.bincount(tokens[:, 1], minlength=len(probabilities)) / n


@torch.no_grad()
def test_greedy_is_the_argmax_over_the_last_context_tokens():
    model = sharp_model(context=8)
    for prompt in (torch.tensor([3, 1, 4, 1]), torch.randint(30, (20,))):
        expected = greedy(model, prompt, 12)
        assert len(set(expected[len(prompt) :])) > 2
        for cold in ({"temperature": 0}, {"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-5}):
            got = generate(model, prompt[None], max_new_tokens=12, vocab_size=30, **cold)
            assert got.tolist() == [expected]


@pytest.mark.parametrize(("options", "kept"), [
    ({"top_k": 2}, [1, 3]), ({"top_k": 9}, [0, 1, 2, 3]), ({"top_p": 1e-320}, [1]),  # 0 in fp32
    ({"top_p": 0.39}, [1]), ({"top_p": 0.41}, [1, 3]), ({"top_p": 0.69}, [1, 3]),
    ({"top_p": 0.71}, [1, 2, 3]), ({"top_p": 1.0}, [0, 1, 2, 3]),
    ({"top_k": 3, "top_p": 0.7}, [1, 3]),  # of the three's own probability
    ({"min_p": 0.3}, [1, 2, 3]), ({"min_p": 0.7}, [1, 3]), ({"min_p": 1.0}, [1]),  # of 0.4
    ({"vocab_size": 3, "top_k": 1}, [1]), ({"vocab_size": 1}, [0]),
], ids=str)  # fmt: skip
def test_only_these_tokens_are_drawn(options, kept):
    shares = draws([0.1, 0.4, 0.2, 0.3], **options)
    assert shares.nonzero().flatten().tolist() == kept
    probabilities = torch.tensor([0.1, 0.4, 0.2, 0.3])[kept]
    torch.testing.assert_close(shares[kept], probabilities / probabilities.sum(), atol=0.05, rtol=0)


def test_ties_keep_no_more_tokens_than_asked_for():
    for options in ({"top_k": 2}, {"top_p": 0.5}):
        assert (draws([0.25] * 4, **options) > 0).sum() == 2


@pytest.mark.parametrize(("logit", "less"), [(2.0, 1.0), (-1.0, -2.0)])
def test_the_penalty_makes_tokens_of_the_text_less_likely(logit, less):
    model, tokens = Bigram([[logit, 1.5, -9.0]] * 3), torch.tensor([[0, 1]] * 2000)
    options = {"max_new_tokens": 1, "repetition_penalty": 2.0, "lengths": torch.ones(2000).long()}
    share = (generate(model, tokens, **options)[:, 1] == 0).float().mean()
    expected = torch.tensor([less, 1.5, -9.0]).softmax(0)[0]
    torch.testing.assert_close(share, expected, atol=0.05, rtol=0)
    options = {"max_new_tokens": 3, "repetition_penalty": 9.0, "temperature": 0}
    model = Bigram([[2.0, 1.9, 1.8]] * 3)
    assert generate(model, tokens[:1, :1], **options).tolist() == [[0, 1, 2, 0]]


@pytest.mark.parametrize("options", [{}, {"top_k": 7}, {"top_p": 0.8}, {"stop_id": 4}], ids=str)
@torch.no_grad()
def test_draws_are_those_of_multinomial_over_all_rows(options):
    """Seeds keep their texts from version to version."""
    model = sharp_model()
    got = generate(
        model, PADDED[:1], max_new_tokens=30, vocab_size=30, temperature=0.9, **options,
        generator=torch.Generator().manual_seed(3),
    )  # fmt: skip
    generator, row = torch.Generator().manual_seed(3), PADDED[0].tolist()
    while len(row) < 35 and (len(row) == 5 or row[-1] != options.get("stop_id")):
        logits = model(torch.tensor([row[-16:]]))[0, -1] / 0.9
        order = logits.argsort(descending=True)
        before = logits.softmax(-1)[order].cumsum(0) - logits.softmax(-1)[order]
        logits[order[options.get("top_k", 30) :]] = float("-inf")
        logits[order[before >= options.get("top_p", 1)]] = float("-inf")
        row.append(int(torch.multinomial(logits.softmax(-1)[None], 1, generator=generator)))
    assert got[0, : len(row)].tolist() == row


def test_a_row_with_a_generator_of_its_own_is_the_same_in_any_batch(monkeypatch):
    # without the interpreter, whose products depend on the place of a row
    monkeypatch.setattr(decode_attention_op, "runs_kernels", lambda device: False)
    model = sharp_model()

    def drawn(*rows: int) -> list[list[int]]:
        options = {"max_new_tokens": 9, "exact": True, "temperature": 2.0}
        generators = [torch.Generator().manual_seed(row) for row in rows]
        lengths = torch.tensor([len(PROMPTS[row]) for row in rows])
        batch = PADDED[list(rows)]
        got = generate(model, batch, generator=generators, lengths=lengths, **options)
        assert not got.requires_grad
        return [row[int(n) : n + 9] for row, n in zip(got.tolist(), lengths)]

    assert torch.equal(generate(model, PADDED, max_new_tokens=0), PADDED)
    together = drawn(0, 1, 2)
    assert [drawn(row)[0] for row in range(3)] == together == drawn(2, 0, 1)[1:] + drawn(2)


def counted(model: GPT) -> list[int]:
    """Records the number of tokens in each later call of the model."""
    counts = []
    model.wte.register_forward_pre_hook(lambda _, args: counts.append(args[0].numel()))
    return counts


@torch.no_grad()
def test_each_token_is_computed_once_as_long_as_the_text_fits():
    model, options = sharp_model(), {"vocab_size": 30, "temperature": 0}
    computed, head, logits = counted(model), model.head, []
    model.head = lambda x, _: logits.append(head(x, None)) or logits[-1]
    generate(model, torch.zeros(2, 5, dtype=torch.long), max_new_tokens=12, **options)
    assert sum(computed) == 2 * (5 + 11)
    generate(model, torch.zeros(2, 5, dtype=torch.long), max_new_tokens=14, **options)
    assert sum(computed) == 2 * (5 + 11) + 2 * (5 + 11 + 2 * 16)  # two more windows
    assert {x.shape for x in logits} == {(2, 1, 30)}, "logits of the last token alone"


@pytest.mark.parametrize("options", [
    *({"position": kind} for kind in ("learned", "rotary", "sinusoidal", "none")),
    {"document_mask": True, "eot_id": 5},
], ids=str)  # fmt: skip
@torch.no_grad()
def test_prompts_of_any_lengths_continue_as_each_would_alone(options):
    model = sharp_model(**options)
    batch = pad_sequence(PROMPTS, batch_first=True, padding_value=29)  # which is not seen
    alone = [greedy(model, prompt, 30) for prompt in PROMPTS]
    for new in (11, 12, 30):  # the context is 16
        got = generate(model, batch, max_new_tokens=new, **GREEDY).tolist()
        for row, prompt, expected in zip(got, PROMPTS, alone, strict=True):
            expected = expected[: len(prompt) + new]
            assert row == expected + [0] * (5 + new - len(expected))
    assert len({token for row in alone for token in row}) > 6


@torch.no_grad()
def test_a_row_ends_with_the_stop_token_and_all_rows_end_the_work():
    model = sharp_model()
    computed = counted(model)
    full = [greedy(model, prompt, 11) for prompt in PROMPTS]
    drawn = [set(row[len(prompt) :]) for row, prompt in zip(full, PROMPTS, strict=True)]
    for stop in sorted(set.union(*drawn)):
        computed.clear()
        got = generate(model, PADDED, max_new_tokens=11, stop_id=stop, **GREEDY)
        steps = 0
        for row, whole, prompt in zip(got.tolist(), full, PROMPTS, strict=True):
            after = whole[len(prompt) :]
            n = after.index(stop) + 1 if stop in after else 11
            steps = max(steps, n)
            expected = whole[: len(prompt) + n]
            assert row == expected + [stop] * (16 - len(expected))
        assert sum(computed) == 3 * (5 + steps - 1)


WINDOW = {"document_mask": True, "eot_id": 7, "window": 4, "position": "rotary"}
RECIPE = {shrunk(name): name for name in RECIPES}
CASES = OPTIONS | {"documents": WINDOW | {"window": None}, "documents-window": WINDOW}
CASES |= {name: {"config": config, "context": 16} for config, name in RECIPE.items()}


def step_by_step(model: GPT, tokens: Tensor, chunks: list[int]) -> Tensor:
    cache = Cache(model.config, len(tokens), sum(chunks), tokens.device)
    return torch.cat([model(part, cache=cache) for part in tokens.split(chunks, 1)], 1)


def documents(B: int = 2, T: int = 16) -> Tensor:
    tokens = draw_tokens(B, T)
    tokens[0, [3, 4, 9]] = 7
    tokens[1, [0, 15]] = 7
    return tokens


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
@torch.no_grad()
def test_logits_equal_those_of_the_whole_at_every_position(options):
    model, tokens = build(**options).eval(), documents()
    expected = model(tokens)
    atol = 1e-5 * max(expected.abs().max().item(), 1)
    for chunks in ([1] * 16, [5, 1, 1, 4, 5]):
        got = step_by_step(model, tokens, chunks)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=atol)


@pytest.mark.parametrize("options", [OPTIONS["modern"], WINDOW | {"architecture": "layernorm"}])
@torch.no_grad()
def test_on_our_kernels_logits_are_the_same(options):
    chosen = tables.select(OpsConfig(), "cpu", {"decode": "triton", "rotary": "triton"})
    model, tokens = build(chosen=chosen, **options).eval(), documents()
    with launches("_decode_attention_kernel"):
        got = step_by_step(model, tokens, [5, 1, 2, 8])
    torch.testing.assert_close(got, model(tokens), rtol=1e-5, atol=1e-5)


def test_a_cache_that_is_full_is_refused():
    model = build().eval()
    cache = Cache(model.config, 2, 10, "cpu")
    model(draw_tokens(T=8), cache=cache)
    with pytest.raises(ValueError, match=r"^tokens: expected at most 2 more, got 3$"):
        model(draw_tokens(T=3), cache=cache)
    model(draw_tokens(T=2), cache=cache)


@pytest.mark.parametrize(("name", "value"), [
    ("top_k", 0), ("top_p", 1.5), ("min_p", 2), ("temperature", math.nan), ("temperature", -1),
    ("repetition_penalty", 0), ("max_new_tokens", -2), ("logprobs", -1),
])  # fmt: skip
def test_an_impossible_option_is_named(name, value):
    options, model = {"max_new_tokens": 2} | {name: value}, build().eval()
    with pytest.raises(UserError, match=f"^{name} is {value}"):
        next(fastgpt.stream(model, IdTokenizer(50), torch.tensor([1, 2]), **options))
    if name != "logprobs":
        with pytest.raises(UserError, match=f"^{name} is {value}"):
            fastgpt.generate(model, torch.tensor([[1, 2]]), **options)
