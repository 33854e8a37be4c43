"""The choice of `auto` on CUDA, tried on a CPU: interpreted kernels, and scripted times."""

import io
import re
import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial
from subprocess import CompletedProcess
from unittest import mock

import pytest
import torch

from fastgpt.autotune import choose, trials
from fastgpt.autotune.choose import run_trial
from fastgpt.autotune.trials import Sizes, make_trial
from fastgpt.config.config import OpsConfig
from fastgpt.config.model import ModelConfig
from fastgpt.files import code_hash
from fastgpt.kernels.spec import no_options
from fastgpt.kernels.specs import SPECS
from fastgpt.model.gpt import GPT
from fastgpt.ops import tables
from tests.parity import backward_only, launches

TINY = ModelConfig(num_layers=1, num_heads=2, dim=32, context=16, vocab_size=50)
SIZES = Sizes(TINY, 2, "fp32", False)
KERNELS = {
    "attention": "_attention_bwd_dq_kernel", "norm": "_norm_bwd_kernel",
    "loss": "_cross_entropy_fwd_kernel", "rotary": "_rotary_kernel",
    "activation": "_bias_act_bwd_kernel",
}  # fmt: skip
COSINE = replace(
    SPECS["bias_act"], inputs=lambda s, make: {"x": make(s["B"], s["T"])}, options=no_options,
    ref=torch.cos,
)  # fmt: skip
"""An op that is correct in any dtype, to be chosen by its times alone."""
NO_MEMORY = torch.OutOfMemoryError


def of(**options):
    return replace(SIZES, model=replace(TINY, **options))


@pytest.fixture
def tried(monkeypatch):
    """Returns a function: the result of a trial with this op of ours, and the times of both."""

    def run(ours, *seconds):
        ops = {"ours": ours, "plain": torch.cos}
        monkeypatch.setitem(trials.TRIALS, "cosine", lambda _: (COSINE, {}, ops))
        told = mock.Mock(side_effect=seconds)
        monkeypatch.setattr(choose, "timer", lambda step: (step(), told())[1])
        return run_trial("cosine", SIZES, "cpu")

    return run


@pytest.mark.parametrize(
    ("ours", "plain", "worth", "chosen"),
    [
        (1.0, 1.0, 1.0, "ours"),
        (1.1, 1.0, 1.0, "plain"),
        (1.1, 1.0, 1.2, "ours"),
        (1.0, NO_MEMORY, 1.0, "ours"),
        (NO_MEMORY, 1.0, 1.0, "plain"),
        (NO_MEMORY, NO_MEMORY, 1.0, "plain"),
    ],
)
def test_the_faster_one_is_chosen(monkeypatch, tried, ours, plain, worth, chosen):
    monkeypatch.setitem(choose.WORTH, "cosine", worth)
    result = tried(lambda x: (x + 0).cos(), ours, plain)
    assert (result["chosen"], result["complaints"]) == (chosen, [])
    times = {"ours": ours, "plain": plain}
    assert result["milliseconds"] == {k: 1e3 * s for k, s in times.items() if s is not NO_MEMORY}


def test_what_is_wrong_is_never_chosen_nor_timed(tried):
    wrong = {"output": lambda x: 1.01 * x.cos(), "gradient": lambda x: backward_only(x, 1.01).cos()}
    for name, ours in wrong.items():
        result = tried(ours)
        assert (result["chosen"], result["milliseconds"]) == ("plain", {})
        assert any(line.startswith(name) for line in result["complaints"])


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(
    "options",
    [
        {"norm": "rmsnorm", "num_kv_heads": 1, "window": 5, "softcap": 3.0, "activation": "swiglu"},
        {"bias": False, "document_mask": True, "eot_id": 0},
        {},
    ],
)
def test_our_kernels_pass_their_trials(monkeypatch, name, options):
    monkeypatch.setattr(choose, "timer", lambda step: step() or 1.0)
    with launches(KERNELS[name]):
        result = run_trial(name, of(**options), "cpu")
    assert result["complaints"] == []
    assert list(result["milliseconds"]) == [result["chosen"], choose.plain_name(name)]


@pytest.mark.parametrize(
    ("options", "packed"), [({}, 1), ({"position": "rotary"}, 0), ({"qk_norm": True}, 0)]
)
def test_attention_is_timed_in_the_form_that_the_model_calls(monkeypatch, options, packed):
    called = mock.Mock(side_effect=tables.PACKED_ATTENTION["triton"])
    monkeypatch.setitem(tables.PACKED_ATTENTION, "triton", called)
    monkeypatch.setattr(choose, "timer", lambda step: step())
    trial = make_trial("attention", of(**options), "cpu", 2, 16)
    with mock.patch.object(torch, "compile", side_effect=lambda op, options: op) as compiled:
        choose.seconds(trial.ops["triton"], trial.inputs, replace(SIZES, compiled=True), "cpu")
    assert (compiled.call_count, called.call_count) == (1, packed)
    model = GPT(replace(TINY, **options), tables.select(OpsConfig(attention="triton"), "cpu"))
    model(torch.zeros(2, 16, dtype=torch.int64))
    assert called.call_count == 2 * packed


@pytest.fixture
def on_cuda(monkeypatch, tmp_path):
    """Runs `choose` as on a GPU; returns what it returns, and the warnings."""
    monkeypatch.setenv("FASTGPT_CACHE", str(tmp_path))
    monkeypatch.setattr(choose.device, "device_name", lambda on: "a GPU")

    def run(asked=OpsConfig()):  # noqa: B008 - frozen
        said = []
        return *choose.choose(asked, SIZES, "cuda", said.append), said

    return run


def test_child_tries_what_is_auto_and_the_answer_is_remembered(on_cuda, monkeypatch, capsys):
    def child_here(command, *, input, **_):
        monkeypatch.setattr(sys, "argv", command[2:])
        monkeypatch.setattr(sys, "stdin", io.StringIO(input.replace("cuda", "cpu")))
        with suppress(SystemExit):
            choose.main()
        out, err = capsys.readouterr()
        return CompletedProcess(command, int(bool(err)), out, err)

    asked = OpsConfig(attention="sdpa")
    monkeypatch.setattr(choose.subprocess, "run", child_here)
    monkeypatch.setattr("os._exit", sys.exit)
    failing = mock.Mock(side_effect=RuntimeError("illegal\n\nSearch for it"))
    with mock.patch.object(choose, "run_trial", failing):
        _, results, _ = on_cuda(asked)
    reasons = {line for result in results.values() for line in result["complaints"]}
    assert reasons == {"the trial ended with code 1: RuntimeError: illegal"}
    monkeypatch.setattr(choose, "timer", lambda step: 1.0)
    chosen, results, said = on_cuda(asked)
    assert chosen == {"norm": "triton", "loss": "chunked", "activation": "triton"}
    assert (results.keys(), len(said)) == (chosen.keys(), 1)
    monkeypatch.setattr(choose.subprocess, "run", partial(pytest.fail))
    assert on_cuda(asked) == (chosen, results, [])


CHILD = """
import json, os, sys, time
for name in sys.argv[1:]:
    if name in {failing}:
        {fail}
    result = dict(chosen="triton", complaints=[], milliseconds=dict())
    print(json.dumps(dict([(name, result)])), 5, sep="\\n", flush=True)
"""
"""A child that makes no trial."""
OPS = ("attention", "norm", "loss", "activation")


@pytest.mark.parametrize(
    ("fail", "failing", "reason"),
    [("os.abort()", OPS[::2], "ended with code -6"), ("time.sleep(60)", OPS, "within 2 s")],
)
def test_an_op_whose_trial_fails_is_pytorchs_and_takes_no_other_with_it(
    on_cuda, monkeypatch, fail, failing, reason
):
    if failing == OPS:
        monkeypatch.setattr(choose, "TIMEOUT", 2.0)
    monkeypatch.setattr(choose, "CHILD", ["-c", CHILD.format(fail=fail, failing=failing)])
    for _ in range(2):  # what was not answered is tried once more
        chosen, _, said = on_cuda()
        for line, op in zip(said[1:], failing, strict=True):
            assert re.match(rf"{op}: .*{reason}", line)
    assert chosen == {op: choose.plain_name(op) if op in failing else "triton" for op in OPS}


def test_other_sizes_or_kernels_are_tried_anew(monkeypatch, tmp_path):
    monkeypatch.setattr(choose, "KERNELS", tmp_path)
    monkeypatch.setattr(choose.device, "device_name", lambda on: "a GPU")
    keys = [choose._key(SIZES, "cuda"), choose._key(replace(SIZES, batch=3), "cuda")]
    for name in ("device.py", "sm_90.json", "notes.md"):
        (tmp_path / name).write_text("1")
        code_hash.cache_clear()
        keys.append(choose._key(SIZES, "cuda"))
    assert len(set(keys[:4])) == 4
    assert keys[4] == keys[3]
