"""The plan of a run, which decides all that settings leave open, once."""

from dataclasses import FrozenInstanceError

import pytest

from fastgpt.cli import configure
from fastgpt.train.plan import resolve
from tests.data.sets import gpt2_files


def test_a_plan_is_frozen_and_holds_numbers_where_settings_leave_them_open(tiny):
    gpt2_files()
    asked = configure(tiny("--eval-every epoch --model.document-mask --data.tokenizer gpt2"))
    plan = resolve(asked)
    assert (asked.model.vocab_size, asked.model.eot_id) == (None, None)
    assert (plan.config.model.vocab_size, plan.config.model.eot_id) == (50257, 50256)
    assert plan.eval_every == -(-sum(plan.epoch_sizes) // asked.global_batch)
    with pytest.raises(FrozenInstanceError):
        plan.config = asked  # pyright: ignore[reportAttributeAccessIssue]


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
