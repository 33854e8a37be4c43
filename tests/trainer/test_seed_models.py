"""The write-ups beside the lecture: TinyStories by characters, and abstracts, one a sample."""

import argparse
import collections
import decimal
import functools
import inspect
import json
import math
import statistics
from pathlib import Path

import pytest
import torch

from fastgpt import sample
from fastgpt.cli import parse
from fastgpt.data.preparing import prepare
from fastgpt.engine import Engine
from fastgpt.errors import UserError
from fastgpt.metrics import read_records
from fastgpt.recipes import RECIPES
from fastgpt.trainer import Trainer
from tests.trainer.models import initial, on_cpu, plain_logits

STORIES, ABSTRACTS = (RECIPES[name][1].model for name in ("tinystories-char", "pubmed"))


# --- M: characters of TinyStories -----------------------------------------------------------------


def test_three_projections_in_one_matrix_give_what_three_give():
    model = initial(STORIES, vocab_size=82).eval()
    tokens = torch.randint(82, (2, 40))
    expected = plain_logits(model, tokens)
    assert expected.shape == (2, 40, 82)
    torch.testing.assert_close(model(tokens).double(), expected, rtol=1e-4, atol=1e-4)


def test_stories_have_no_biases_and_heads_of_32():
    model = initial(STORIES, vocab_size=82)
    assert not [name for name in model.state_dict() if name.endswith("bias")]
    blocks = 6 * (4 * 128**2 + 8 * 128**2 + 2 * 128)
    assert model.num_params() == 2 * 82 * 128 + 256 * 128 + blocks + 128
    assert model.config.head_dim == 32


# --- O and P: abstracts ---------------------------------------------------------------------------


def test_abstracts_model_has_the_published_parameters():
    assert initial(ABSTRACTS, vocab_size=28_996).num_params() == 8_704_068


def docstrings() -> list[str]:
    """Of the classes and functions of a few modules: real prose, and no two alike."""
    modules = (argparse, collections, decimal, functools, inspect, json, math, statistics)
    found = {
        text
        for module in modules
        for member in vars(module).values()
        if (inspect.isroutine(member) or inspect.isclass(member))
        and (text := inspect.getdoc(member))
    }
    return sorted(found)


@pytest.fixture(scope="module")
def abstracts(tmp_path_factory) -> Path:
    """A folder for FASTGPT_DATA with docstrings as `pubmed`."""
    place = tmp_path_factory.mktemp("abstracts")
    source = place / "abstracts.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in docstrings()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTGPT_CACHE", str(place / "cache"))
        prepare(
            str(source), place / "pubmed", tokenizer="wordpiece", vocab_size=800, val_fraction=0.2
        )
    return place


@pytest.fixture
def flags(abstracts, tmp_path, monkeypatch, one_thread) -> list[str]:
    """The recipe, but small."""
    monkeypatch.setenv("FASTGPT_DATA", str(abstracts))
    return [
        "pubmed", "--model.num-layers", "2", "--model.dim", "32", "--model.context", "48",
        "--train.batch-tokens", str(8 * 48), "--train.device", "cpu", "--train.precision", "fp32",
        "--train.sample-tokens", "5", "--log-every", "5", "--run-dir", str(tmp_path / "run"),
    ]  # fmt: skip


def test_a_run_in_epochs_tells_its_loss_and_perplexity_after_each(
    abstracts, flags, tmp_path, capsys
):
    Trainer(parse([*flags, "--epochs", "2"])).fit()
    run, said = tmp_path / "run", capsys.readouterr().out
    prepared = json.loads((abstracts / "pubmed" / "manifest.json").read_text())
    documents = prepared["splits"]["train"]["documents"]
    log = read_records(run / "metrics.jsonl")
    losses = {r["step"]: r["val_loss"] for r in log if "val_loss" in r}
    per_epoch = math.ceil(documents / 8)
    assert list(losses) == [0, per_epoch, math.ceil(2 * documents / 8)]
    assert losses[0] == pytest.approx(math.log(800), abs=1)
    assert list(losses.values()) == sorted(losses.values(), reverse=True)
    for step, loss in losses.items():
        epoch = step * 8 / documents
        assert f"step {step:>6}  epoch {epoch:.2f}  val loss {loss:.4f}" in said
        assert f"perplexity {math.exp(loss):.2f}" in said
    progress = [r["step"] for r in log if "train_loss" in r]
    assert progress == [*range(5, progress[-1], 5), list(losses)[-1]]


def test_padding_changes_neither_loss_nor_gradients(flags):
    """Each document alone, without its filling, and the mean over their targets."""
    engine = Engine(parse(flags))
    x, y = engine.loader.next()
    engine.loader.close()
    lengths = (y != -100).sum(1)
    assert lengths.min() < 48
    model = initial(engine.config.model, chosen=on_cpu(attention="torch", dropout="torch")).eval()
    loss = model(x, y)
    loss.backward()
    padded = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    total = sum(model(x[i : i + 1, :n], y[i : i + 1, :n]) * n for i, n in enumerate(lengths))
    alone = total / lengths.sum()
    alone.backward()
    torch.testing.assert_close(loss, alone)
    for got, p in zip(padded, model.parameters()):
        torch.testing.assert_close(got, p.grad, rtol=1e-4, atol=1e-6)
    filled = x.masked_fill(y == -100, 7)  # whatever stands there
    torch.testing.assert_close(model(filled, y), loss.detach())


def test_steps_on_the_command_line_take_the_place_of_epochs(flags):
    assert (parse(flags).epochs, parse(flags).eval_epochs) == (20, 1)
    config = parse([*flags, "--steps", "7", "--eval_every=3"])
    assert (config.epochs, config.eval_epochs) == (None, None)
    assert (config.steps, config.eval_every) == (7, 3)
    with pytest.raises(UserError, match="--steps and --epochs are both given"):
        parse([*flags, "--steps", "7", "--epochs", "1"])


@pytest.mark.parametrize(
    ("recipe", "named"),
    [("pubmed", "abstracts.jsonl"), ("tinystories-char", "TinyStories-valid.txt")],
)
def test_missing_data_is_named_with_what_to_do(recipe, named, tmp_path, monkeypatch):
    monkeypatch.setenv("FASTGPT_DATA", str(tmp_path))
    with pytest.raises(UserError) as error:
        Engine(parse([recipe, "--train.device", "cpu"]))
    said = str(error.value)
    assert f"python -m fastgpt.prepare {named} --tokenizer" in said
    assert f"--out {tmp_path / recipe}" in said
    assert "\n" not in said


# --- any checkpoint, one command ------------------------------------------------------------------

SMALL = (
    "--steps 1 --eval-every 0 --train.device cpu --train.precision fp32 --train.sample-tokens 0"
    " --data.val-fraction 0.2 --data.eval-batches 0 --data.align none --train.batch-tokens 512"
)
SMALLER = "--model.num-layers 2 --model.num-heads 2 --model.dim 32 --model.context 16"


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_checkpoint_of_any_recipe_samples(recipe, text, tmp_path, one_thread, capsys):
    shrink = SMALLER if RECIPES[recipe][1].model.dim > 64 else ""
    place = f"--data.source {text} --run-dir {tmp_path / 'run'} --model.vocab-size None"
    Trainer(parse([recipe, *f"{SMALL} {shrink} {place}".split()])).fit()
    capsys.readouterr()
    sample.main([str(tmp_path / "run"), "--tokens", "40", "--n", "2", "--device", "cpu"])
    first, second = capsys.readouterr().out.split("\n---\n")
    assert first.startswith("\n")
    assert first != second
