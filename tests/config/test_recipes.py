"""Recipes of the lecture and of other write-ups: sizes, first losses, overfitting, sampling."""

import json
import math
import re
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name everyone knows it by

from fastgpt import sample
from fastgpt.cli import configure
from fastgpt.config.model import ModelConfig
from fastgpt.config.recipes import RECIPES
from fastgpt.data.tokenizers import CharTokenizer
from fastgpt.errors import UserError
from fastgpt.model.gpt import GPT
from fastgpt.train.trainer import Trainer
from tests.data.sets import prepared
from tests.model.plain import plain_logits
from tests.models import initial, on_cpu, shrunk
from tests.runs import series

LADDER = [name for name in RECIPES if name.startswith("lecture-")]
# the last packs three projections in one matrix, which must give what three give
WRITTEN_TWICE = [*(x for x in LADDER if not x.startswith("lecture-gpt")), "tinystories-char"]


def build(config: ModelConfig) -> GPT:
    return initial(config, chosen=on_cpu(attention="auto"))


def recipe(name: str, **changes) -> ModelConfig:
    return replace(RECIPES[name][1].model, **{"vocab_size": 65, **changes})


@pytest.mark.parametrize("name", WRITTEN_TWICE)
def test_each_step_is_what_the_notes_say(name):
    model = build(recipe(name, vocab_multiple=64)).eval()
    tokens, targets = torch.randint(65, (2, 4, 8))
    expected = plain_logits(model, tokens)
    torch.testing.assert_close(model(tokens).double(), expected, rtol=1e-5, atol=1e-5)
    loss = F.cross_entropy(expected.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(model(tokens, targets).double(), loss, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("bigram", "dropout", 0.5),
        ("head", "norm", "rmsnorm"),
        ("multihead", "ffn_dim", 64),
        ("feedforward", "activation", "swiglu"),
    ],
)
def test_an_option_without_a_part_in_a_step_is_refused(name, option, value):
    with pytest.raises(UserError, match=f"^model.{option} is {value}"):
        build(recipe(f"lecture-{name}", **{option: value}))


@pytest.fixture(scope="module")
def corpus(shakespeare) -> Tensor:
    """Tiny shakespeare as ids (N,)."""
    text = shakespeare.read_text(encoding="utf-8")
    return torch.from_numpy(CharTokenizer(text).encode(text).astype("int64"))


@torch.no_grad()
def loss_over(model: GPT, ids: Tensor, every: int) -> float:
    """Computes the loss over every so many-th window of the text."""
    T = model.config.context
    count = (len(ids) - 1) // T
    windows, targets = (ids[i : i + count * T].view(-1, T)[::every] for i in (0, 1))
    pairs = zip(windows.split(256), targets.split(256))
    return sum(model(x, y).item() * len(x) for x, y in pairs) / len(windows)


def test_bigram_starts_at_the_published_loss(corpus):
    """It is ln V + 1/2 for rows of normal numbers; a few frequent rows decide how far off."""
    model = build(recipe("lecture-bigram"))
    assert loss_over(model, corpus, every=10) == pytest.approx(4.67, abs=0.15)


@pytest.mark.parametrize(
    "options", [{"init": "normal"}, {"init": "gpt2", "bias": ("mlp",), "tied": True}], ids=str
)
def test_gpt_starts_at_the_loss_its_initialisation_gives(corpus, options):
    """The last LayerNorm's output has length sqrt(C), so that logits are N(0, C 0.02^2)."""
    assert RECIPES["lecture-gpt"][1].model.init == "normal"
    model = build(recipe("lecture-gpt", **options)).eval()
    expected = math.log(65) + 192 * 0.02**2 / 2
    assert loss_over(model, corpus, every=800) == pytest.approx(expected, abs=0.1)


def floor(tokens: Tensor, targets: Tensor, reach: int) -> float:
    """Computes the entropy of the next token of a batch (B, T), given the last `reach` ones."""
    seen = defaultdict(Counter)
    for row, wanted in zip(tokens.tolist(), targets.tolist()):
        for t, token in enumerate(wanted):
            seen[tuple(row[max(0, t + 1 - reach) : t + 1])][token] += 1
    pairs = [(count, counts.total()) for counts in seen.values() for count in counts.values()]
    return sum(count * math.log(total / count) for count, total in pairs) / targets.numel()


def overfit(model: GPT, tokens: Tensor, targets: Tensor, below: float) -> float:
    """Trains a model on one batch, for 3000 steps or to a loss below `below`; returns the last."""
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


@pytest.mark.parametrize("name", {shrunk(name): name for name in RECIPES}.values())
def test_one_batch_is_learnt_to_its_floor(name, corpus, one_thread):
    config = shrunk(name)
    T = config.context
    rows = 2 if name == "lecture-head" else 4  # 7,553 parameters that hold little
    windows = torch.stack([corpus[1000 * i : 1000 * i + T + 1] for i in range(rows)])
    tokens, targets = windows[:, :-1], windows[:, 1:]
    lowest = floor(tokens, targets, 1 if config.architecture == "bigram" else T)
    reached = overfit(build(config), tokens, targets, below=lowest + 0.04)
    assert lowest - 1e-3 < reached < lowest + 0.05


@pytest.fixture(scope="module")
def abstracts(tmp_path_factory) -> Path:
    """Makes a folder for FASTGPT_DATA with paragraphs of Python's manual as `pubmed`."""
    place = tmp_path_factory.mktemp("abstracts")
    paragraphs = sorted(set("\n\n".join(topics.values()).split("\n\n")))
    prepared(place / "pubmed", paragraphs[::10], tokenizer="wordpiece", vocab_size=800)
    return place


@pytest.fixture
def flags(abstracts, tmp_path, monkeypatch, one_thread) -> list[str]:
    """Returns the flags for a small version of the recipe pubmed."""
    monkeypatch.setenv("FASTGPT_DATA", str(abstracts))
    small = (
        "--model.num-layers 2 --model.dim 32 --model.context 48 --train.batch-tokens 384"
        " --train.device cpu --train.precision fp32 --train.sample-tokens 5 --log-every 5"
    )
    return ["pubmed", *small.split(), "--run-dir", str(tmp_path / "run")]


def test_a_run_in_epochs_tells_its_loss_after_each(abstracts, flags, tmp_path):
    assert (configure(flags).epochs, configure(flags).eval_every) == (20, "epoch")
    config = configure([*flags, "--steps", "7", "--eval_every=3"])
    assert (config.epochs, config.steps, config.eval_every) == (None, 7, 3)
    Trainer(configure([*flags, "--epochs", "2"])).fit()
    run = tmp_path / "run"
    manifest = json.loads((abstracts / "pubmed" / "manifest.json").read_text())
    epoch = manifest["splits"]["train"]["documents"] / 8  # in steps
    losses = series(run, "val_loss")
    assert list(losses) == [0, math.ceil(epoch), math.ceil(2 * epoch)]
    assert losses[0] == pytest.approx(math.log(800), abs=1)
    assert list(losses.values()) == sorted(losses.values(), reverse=True)
    progress = list(series(run, "train_loss"))
    assert progress == [1, *range(5, progress[-1], 5), list(losses)[-1]]


SMALL = (
    "--steps 1 --eval-every 0 --train.device cpu --train.precision fp32 --train.sample-tokens 0"
    " --data.val-fraction 0.2 --data.sampling epoch --data.align none --train.batch-tokens 512"
)
SMALLER = "--model.num-layers 2 --model.num-heads 2 --model.dim 32 --model.context 16"


@pytest.mark.parametrize(
    "recipe", ["lecture-bigram", "lecture-head", "lecture-residual", "gpt2-124m-modern", "pubmed"]
)
def test_a_checkpoint_of_any_architecture_samples(
    recipe, text, tmp_path, one_thread, no_curves, capsys
):
    shrink = SMALLER if RECIPES[recipe][1].model.dim > 64 else ""
    place = f"--data.source {text} --run-dir {tmp_path / 'run'} --model.vocab-size None"
    Trainer(configure([recipe, *f"{SMALL} {shrink} {place}".split()])).fit()
    capsys.readouterr()
    sample.main([str(tmp_path / "run"), "--tokens", "40", "--n", "2", "--device", "cpu"])
    empty, first, second = re.split(r"--- .*sample \d of 2 ---\n", capsys.readouterr().out)
    assert empty == ""
    assert first != second
