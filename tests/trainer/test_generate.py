import pytest
import torch
from torch import Tensor, nn

from fastgpt import ops
from fastgpt.cache import Cache
from fastgpt.config import ModelConfig, OpsConfig
from fastgpt.generate import generate
from fastgpt.model import GPT

PROMPT = torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6]])


def sharp_model() -> GPT:
    """Small, and sure of itself: with GPT-2's initial weights every token would be as likely."""
    config = ModelConfig(num_layers=2, num_heads=2, dim=16, context=8, vocab_size=30)
    model = GPT(config, ops.select(OpsConfig(), "cpu", compiled=False)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.3)
    return model


class Bigram(nn.Module):
    """Stands in for the network: the logits follow from the last token alone."""

    def __init__(self, logits: list[list[float]]) -> None:
        super().__init__()
        self.table = torch.tensor(logits)
        self.config = ModelConfig(num_heads=1, dim=1, context=4)

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        return self.table[tokens]


def draws(probabilities: list[float], n: int = 2000, **options) -> Tensor:
    """How often each token was drawn, as a share."""
    model = Bigram([torch.tensor(probabilities).log().tolist()] * len(probabilities))
    options = {"vocab_size": len(probabilities), **options}
    tokens = generate(model, torch.zeros(n, 1, dtype=torch.long), max_new_tokens=1, **options)
    return torch.bincount(tokens[:, 1], minlength=len(probabilities)) / n


def test_greedy_is_the_argmax_over_the_last_context_tokens():
    model, tokens = sharp_model(), PROMPT
    for _ in range(12):  # beyond the context of 8
        following = model(tokens[:, -8:])[:, -1].argmax(-1, keepdim=True)
        tokens = torch.cat((tokens, following), 1)
    assert len(set(tokens[0, 4:].tolist())) > 3
    options = {"max_new_tokens": 12, "vocab_size": 30}
    assert torch.equal(generate(model, PROMPT, temperature=0, **options), tokens)
    assert torch.equal(generate(model, PROMPT, top_k=1, **options), tokens)
    assert torch.equal(generate(model, PROMPT, top_p=1e-9, **options), tokens)
    assert torch.equal(generate(model, PROMPT, temperature=1e-5, **options), tokens)


def test_rows_do_not_see_each_other():
    model = sharp_model()
    options = {"max_new_tokens": 12, "vocab_size": 30, "temperature": 0}
    alone = torch.cat([generate(model, row[None], **options) for row in PROMPT])
    assert torch.equal(generate(model, PROMPT, **options), alone)


def test_a_prompt_longer_than_the_context_is_cropped_and_kept():
    model = sharp_model()
    prompt = torch.randint(30, (1, 20))
    long = generate(model, prompt, max_new_tokens=3, vocab_size=30, temperature=0)
    short = generate(model, prompt[:, -8:], max_new_tokens=3, vocab_size=30, temperature=0)
    assert torch.equal(long[:, :20], prompt)
    assert torch.equal(long[:, 20:], short[:, 8:])


def test_draws_repeat_from_the_generators_seed_alone():
    model = sharp_model()

    def drawn(seed: int, **options) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        options = {"max_new_tokens": 10, "vocab_size": 30, "generator": generator, **options}
        return generate(model, PROMPT, temperature=3.0, **options)

    first = drawn(1)
    torch.manual_seed(99)
    assert torch.equal(drawn(1), first)
    assert not torch.equal(drawn(2), first)
    assert torch.equal(first[:, :4], PROMPT)
    assert torch.equal(drawn(1, max_new_tokens=0), PROMPT)


def test_draws_follow_the_models_distribution():
    shares = draws([0.5, 0.3, 0.2])
    torch.testing.assert_close(shares, torch.tensor([0.5, 0.3, 0.2]), atol=0.05, rtol=0)


def test_temperature_divides_the_logits():
    shares = draws([0.8, 0.2], temperature=2.0)  # square roots of the probabilities, 2 : 1
    torch.testing.assert_close(shares, torch.tensor([2 / 3, 1 / 3]), atol=0.05, rtol=0)
    assert draws([0.8, 0.2], temperature=0.2)[1] < 0.01  # 4 ** -5


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 1}, [1]),
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 4}, [0, 1, 2, 3]),
        ({"top_k": 9}, [0, 1, 2, 3]),
        ({"top_p": 1e-320}, [1]),  # 0 in fp32
        ({"top_p": 0.1}, [1]),  # the likeliest is kept even where it is more than enough
        ({"top_p": 0.39}, [1]),
        ({"top_p": 0.41}, [1, 3]),
        ({"top_p": 0.69}, [1, 3]),
        ({"top_p": 0.71}, [1, 2, 3]),
        ({"top_p": 1.0}, [0, 1, 2, 3]),
        ({"top_k": 3, "top_p": 0.7}, [1, 3]),  # of the three's own probability
        ({"vocab_size": 3}, [0, 1, 2]),
        ({"vocab_size": 3, "top_k": 1}, [1]),
        ({"vocab_size": 1}, [0]),
    ],
    ids=str,
)
def test_only_these_tokens_are_drawn(options, kept):
    shares = draws([0.1, 0.4, 0.2, 0.3], **options)
    assert shares.nonzero().flatten().tolist() == kept
    probabilities = torch.tensor([0.1, 0.4, 0.2, 0.3])[kept]
    torch.testing.assert_close(shares[kept], probabilities / probabilities.sum(), atol=0.05, rtol=0)


@pytest.mark.parametrize("options", [{"top_k": 2}, {"top_p": 0.5}], ids=str)
def test_ties_keep_no_more_tokens_than_asked_for(options):
    assert (draws([0.25] * 4, **options) > 0).sum() == 2


def test_greedy_ignores_ids_without_text():
    model = Bigram([[0.0, 1.0, 9.0]] * 3)
    tokens = generate(model, torch.tensor([[0]]), max_new_tokens=3, vocab_size=2, temperature=0)
    assert tokens.tolist() == [[0, 1, 1, 1]]


def test_no_gradient_is_kept():
    model = sharp_model()
    tokens = generate(model, PROMPT, max_new_tokens=2, vocab_size=30)
    assert not tokens.requires_grad
    assert all(p.grad is None for p in model.parameters())
