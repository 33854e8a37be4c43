"""The lecture's ladder and the write-ups around it: sizes, first losses, what one batch can teach,
and one command that samples from any of them."""

import math
from collections import Counter, defaultdict
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name everyone knows it by

from fastgpt.config import ModelConfig
from fastgpt.data.sources import SHAKESPEARE_FILE
from fastgpt.data.tokenizer import CharTokenizer
from fastgpt.errors import UserError
from fastgpt.model import GPT
from fastgpt.recipes import RECIPES
from fastgpt.storage import data_dir
from tests.trainer.models import each_attention, initial, on_cpu, plain_logits

LADDER = [name for name in RECIPES if name.startswith("lecture-")]
FIVE_STEPS = [name for name in LADDER if not name.startswith("lecture-gpt")]


def build(config: ModelConfig, attention: str = "auto") -> GPT:
    return initial(config, chosen=on_cpu(attention=attention))


def recipe(name: str, **changes) -> ModelConfig:
    return replace(RECIPES[name][1].model, **{"vocab_size": 65, **changes})


# --- sizes ----------------------------------------------------------------------------------------

# Published: G 2.715713, G' 10.79, H 0.209729 million. A to F by hand, with n = 32:
# A 65^2; B (65 + 8) n + 3 n^2 + 65 (n + 1); C the same; D and n (n + 1);
# E (65 + 8) n + 3 (3 n^2 + n (n + 1) + 4 n (n + 1) + n (4 n + 1)) + 65 (n + 1); F and 7 * 2 n
PARAMETERS = {
    "lecture-bigram": 4_225,
    "lecture-head": 7_553,
    "lecture-multihead": 7_553,
    "lecture-feedforward": 8_609,
    "lecture-residual": 41_921,
    "lecture-layernorm": 42_369,
    "lecture-gpt": 2_715_713,
    "lecture-gpt-full": 10_788_929,
    "lecture-gpt-small": 209_729,
}


@pytest.mark.parametrize("vocab_multiple", [1, 64])
@pytest.mark.parametrize("name", LADDER)
def test_parameters_are_the_published_ones(name, vocab_multiple):
    assert build(recipe(name, vocab_multiple=vocab_multiple)).num_params() == PARAMETERS[name]


# --- each step, written a second time -------------------------------------------------------------


@each_attention
@pytest.mark.parametrize("name", FIVE_STEPS)
def test_each_step_is_what_the_notes_say(name, attention):
    model = build(recipe(name, vocab_multiple=64), attention=attention)
    tokens, targets = torch.randint(65, (2, 4, 8))
    expected = plain_logits(model, tokens)
    torch.testing.assert_close(model(tokens).double(), expected, rtol=1e-5, atol=1e-5)
    loss = F.cross_entropy(expected.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(model(tokens, targets).double(), loss, rtol=1e-5, atol=1e-5)


def test_steps_differ_in_what_the_notes_add():
    parts = {
        name: {key.split(".", 2)[-1] for key in build(recipe(name)).state_dict() if key[0] == "h"}
        for name in FIVE_STEPS
    }
    assert parts["lecture-bigram"] == set()
    assert parts["lecture-head"] == parts["lecture-multihead"] == {"attn.c_attn.weight"}
    assert parts["lecture-feedforward"] == {"attn.c_attn.weight", "mlp.0.weight", "mlp.0.bias"}
    assert "attn.c_proj.bias" in parts["lecture-residual"]
    added = parts["lecture-layernorm"] - parts["lecture-residual"]
    assert added == {"ln_1.weight", "ln_1.bias", "ln_2.weight", "ln_2.bias"}


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("bigram", "dropout", 0.5),
        ("bigram", "position", "rotary"),
        ("bigram", "num_kv_heads", 1),
        ("head", "norm", "rmsnorm"),
        ("multihead", "ffn_dim", 64),
        ("feedforward", "activation", "swiglu"),
        ("feedforward", "bias", False),
        ("residual", "norm_position", "post"),
    ],
)
def test_an_option_of_which_a_step_has_no_part_is_refused(name, option, value):
    said = f"^model.{option} is {value}: it changes nothing in model.architecture "
    with pytest.raises(UserError, match=said):
        build(recipe(f"lecture-{name}", **{option: value}))


# --- before training ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def corpus() -> Tensor:
    """Tiny shakespeare as ids (N,); without it the test is skipped."""
    path = data_dir() / SHAKESPEARE_FILE
    if not path.is_file():
        pytest.skip(f"FASTGPT_DATA has no {SHAKESPEARE_FILE}")
    text = path.read_text(encoding="utf-8")
    return torch.from_numpy(CharTokenizer(text).encode(text).astype("int64"))


@torch.no_grad()
def loss_over(model: GPT, ids: Tensor, every: int = 1) -> float:
    """Over every so many-th window of the text."""
    T = model.config.context
    count = (len(ids) - 1) // T
    windows, targets = ids[: count * T].view(-1, T)[::every], ids[1 : count * T + 1].view(-1, T)
    pairs = list(zip(windows.split(256), targets[::every].split(256)))
    losses = torch.stack([model(x, y) for x, y in pairs])
    sizes = torch.tensor([len(x) for x, _ in pairs])
    return float((losses * sizes).sum() / sizes.sum())


def test_bigram_starts_at_the_published_loss(corpus):
    """ln V + 1/2 where the rows are normal numbers; a few frequent ones decide how far off."""
    assert loss_over(build(recipe("lecture-bigram")), corpus) == pytest.approx(4.67, abs=0.15)


@pytest.mark.parametrize("init", ["gpt2", "normal"])
@pytest.mark.parametrize(
    "options", [{}, {"head_bias": False}, {"head_bias": False, "tied": True}], ids=str
)
def test_gpt_starts_at_the_loss_its_initialisation_gives(corpus, options, init):
    """The last LayerNorm's output has length sqrt(C), so that logits are N(0, C 0.02^2)."""
    assert RECIPES["lecture-gpt"][1].model.init == "normal"
    model = build(recipe("lecture-gpt", init=init, **options)).eval()
    expected = math.log(65) + 192 * 0.02**2 / 2
    assert loss_over(model, corpus, every=100) == pytest.approx(expected, abs=0.1)


# --- one batch, learnt by heart -------------------------------------------------------------------


def floor(tokens: Tensor, targets: Tensor, reach: int) -> float:
    """The least loss on a batch (B, T): the entropy of the next token given the `reach` last ones,
    and where the row begins, as far as a model of that reach can see it."""
    seen = defaultdict(Counter)
    for row, wanted in zip(tokens.tolist(), targets.tolist()):
        for t, token in enumerate(wanted):
            seen[tuple(row[max(0, t + 1 - reach) : t + 1])][token] += 1
    total = -sum(
        count * math.log(count / counts.total())
        for counts in seen.values()
        for count in counts.values()
    )
    return total / targets.numel()


def overfit(model: GPT, tokens: Tensor, targets: Tensor, below: float) -> float:
    """The loss at which AdamW stops: the first one that is lower than `below`, or the 3000th."""
    # one head's softmax saturates and stays where it is, unless its weights decay
    table = model.config.architecture == "bigram"
    lr, decay = (0.3, 0.0) if table else (3e-3, 0.3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=decay, fused=True)
    for step in range(3000):
        loss = model(tokens, targets)
        if loss < below:
            break
        optimizer.param_groups[0]["lr"] = lr * min(1.0, (step + 1) / 20) * (1 - step / 3000)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


SHRUNK = {"num_layers": 2, "num_heads": 2, "dim": 64, "context": 16}
LARGER = ("gpt2-355m", "gpt2-774m", "gpt2-1558m")
"""gpt2-124m's network, with more of it."""


def shrunk(name: str) -> ModelConfig:
    """The network of a recipe: small ones as they are, of others what makes them what they are."""
    model = RECIPES[name][1].model
    if model.dim > 64:
        model = replace(model, **SHRUNK)
    return replace(model, vocab_size=65, document_mask=False, **NO_DROPOUT)


NO_DROPOUT = {name: 0.0 for name in ModelConfig.__slots__ if name.endswith("dropout")}


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in LARGER])
def test_one_batch_is_learnt_to_its_floor(name, corpus, one_thread):
    config = shrunk(name)
    T = config.context
    rows = 2 if name == "lecture-head" else 4  # 7,553 parameters that hold little
    windows = torch.stack([corpus[1000 * i : 1000 * i + T + 1] for i in range(rows)])
    tokens, targets = windows[:, :-1], windows[:, 1:]
    lowest = floor(tokens, targets, 1 if config.architecture == "bigram" else T)
    reached = overfit(build(config), tokens, targets, below=lowest + 0.04)
    assert lowest - 1e-3 < reached < lowest + 0.05


def test_the_floor_of_a_batch():
    tokens = torch.tensor([[0, 1, 2], [0, 1, 3], [4, 1, 2]])
    targets = torch.tensor([[1, 2, 5], [1, 3, 5], [1, 2, 6]])
    # after 0: 1 twice; after 0 1: 2 or 3; the rest is certain
    assert floor(tokens, targets, 3) == pytest.approx(2 * math.log(2) / 9)
    # after a 1 anywhere: 2, 3, 2; after a 2: 5, 6
    blind = math.log(3) - 2 / 3 * math.log(2)
    assert floor(tokens, targets, 1) == pytest.approx((3 * blind + 2 * math.log(2)) / 9)
