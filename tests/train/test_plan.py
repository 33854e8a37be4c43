"""The plan of a run, which decides all that settings leave open, once."""

import re
from dataclasses import FrozenInstanceError

import pytest

from fastgpt.cli import configure
from fastgpt.config.model import ModelConfig
from fastgpt.model.flops import flops_per_token
from fastgpt.train.plan import resolve
from tests.data.sets import gpt2_files
from tests.processes import ROOT


def test_a_plan_is_frozen_and_holds_numbers_where_settings_leave_them_open(tiny):
    gpt2_files()
    asked = configure(tiny("--eval-every epoch --model.document-mask --data.tokenizer gpt2"))
    plan = resolve(asked)
    assert (asked.model.vocab_size, asked.model.eot_id) == (None, None)
    assert (plan.config.model.vocab_size, plan.config.model.eot_id) == (50257, 50256)
    assert plan.eval_every == -(-sum(plan.epoch_sizes) // asked.global_batch)
    with pytest.raises(FrozenInstanceError):
        plan.config = asked  # pyright: ignore[reportAttributeAccessIssue]


def test_nothing_replaces_a_setting_after_the_plan():
    decide = {
        "train/plan.py",
        "train/data.py",
        "train/init_from.py",
        "model/build.py",
        "model/gpt.py",
    }
    rooms = ("train", "model", "parallel", "checkpoint", "guards", "evaluate", "logs")
    paths = [path for room in rooms for path in (ROOT / "fastgpt" / room).glob("*.py")]
    replaces = re.compile(r"\b(replace|overlay)\(\s*[\w.]*(config|plan|train)\b")
    found = {path for path in paths if replaces.search(path.read_text(encoding="utf-8"))}
    assert {path.relative_to(ROOT / "fastgpt").as_posix() for path in found} == decide


@pytest.mark.parametrize(
    ("flags", "micro_batch", "warned"),
    [
        ("--train.batch-tokens 224 --train.micro-batch 3", 2, None),  # 14 sequences
        ("--train.batch-tokens 224 --train.micro-batch 4", 2, "micro-batches of 2 at most"),
        ("--train.batch-tokens 224 --train.micro-batch 7", 7, None),
        ("--optim.warmup-steps 8", 8, None),
        ("--optim.warmup-steps 9", 8, "warmup-steps is 9"),
    ],
)
def test_settings_that_waste_something_are_warned_of(tiny, flags, micro_batch, warned):
    said = []
    assert resolve(configure(tiny(flags)), said.append).micro_batch == micro_batch
    assert [warned in line for line in said] == [True] * (warned is not None)


BLOCK = 4 * 64 * 64 + 2 * 64 * 256  # weights of a layer of width 64


@pytest.mark.parametrize(
    ("options", "weights", "keys"),
    [
        ({}, BLOCK, 36 / 8),
        ({"num_kv_heads": 1}, 64 * (64 + 32) + 64 * 64 + 2 * 64 * 256, 36 / 8),
        ({"activation": "swiglu", "ffn_dim": 100}, 4 * 64 * 64 + 3 * 64 * 100, 36 / 8),
        ({"window": 3}, BLOCK, (1 + 2 + 6 * 3) / 8),
        ({"window": 99, "tied": False}, BLOCK, 36 / 8),
    ],
)
def test_flops_follow_the_shapes(options, weights, keys):
    """Each of 8 tokens sees `keys` tokens in the mean."""
    small = {"num_layers": 2, "num_heads": 4, "dim": 64, "context": 8, "vocab_size": 100}
    config = ModelConfig(**small, **options)
    head = 128 * 64  # padded to a multiple of 64
    # 2 FLOPs a weight, and a number of q k^T or weights x v: once forward, twice backward
    assert flops_per_token(config) == 6 * (2 * weights + head) + 2 * 6 * 2 * 64 * keys
