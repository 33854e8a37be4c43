"""The plan of a run, which decides all that settings leave open, once."""

import ast
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

import fastgpt
from fastgpt.cli import configure
from fastgpt.train.plan import resolve
from tests.data.sets import gpt2_files

ROOT = Path(fastgpt.__file__).parent
DECIDE = {
    "train/plan.py": None,
    "train/data.py": {"with_vocabulary"},  # the plan calls it, and the next two
    "train/init_from.py": {"with_architecture", "with_tokenizer"},
    "model/build.py": {"__init__"},  # the table of a bigram model is a GPT of other sizes
    "model/gpt.py": {"from_config"},
}
"""Functions that replace settings, by module; None: all of a module may."""


def test_nothing_replaces_a_setting_after_the_plan():
    for room in ("train", "model", "parallel", "checkpoint", "guards", "evaluate", "logs"):
        for path in sorted((ROOT / room).glob("*.py")):
            name, tree = path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())
            allowed = DECIDE.get(name, set())
            functions = [x for x in ast.walk(tree) if isinstance(x, ast.FunctionDef)]
            for function in functions if allowed is not None else ():
                replaced = {
                    ast.unparse(call.args[0])
                    for call in ast.walk(function)
                    if isinstance(call, ast.Call) and call.args
                    if ast.unparse(call.func) in ("replace", "dataclasses.replace", "overlay")
                }
                changes = {x for x in replaced if "config" in x or "plan" in x or "train" in x}
                assert not changes or function.name in allowed, f"{name}: {function.name}"


def test_a_plan_is_frozen_and_holds_numbers_where_settings_leave_them_open(tiny):
    gpt2_files()
    asked = configure(tiny("--eval-every epoch --model.document-mask --data.tokenizer gpt2"))
    plan = resolve(asked)
    assert (asked.model.vocab_size, asked.model.eot_id) == (None, None)
    assert (plan.config.model.vocab_size, plan.config.model.eot_id) == (50257, 50256)
    assert plan.eval_every == -(-sum(plan.epoch_sizes) // asked.global_batch)
    with pytest.raises(FrozenInstanceError):
        plan.config = asked  # pyright: ignore[reportAttributeAccessIssue]
