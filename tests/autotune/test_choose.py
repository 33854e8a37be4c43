"""The choice of `auto` on CUDA, tried on a CPU: interpreted kernels, and scripted times."""

import json
from dataclasses import replace
from functools import partial
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
    "attention": "_attention_bwd_dq_kernel",
    "norm": "_norm_bwd_kernel",
    "loss": "_cross_entropy_fwd_kernel",
    "rotary": "_rotary_kernel",
    "activation": "_bias_act_bwd_kernel",
}


@pytest.fixture
def takes(monkeypatch):
    """Returns a function that sets how long each step takes, ours first; each runs once."""

    def take(*seconds):
        told = mock.Mock(side_effect=seconds)
        monkeypatch.setattr(choose, "timer", lambda step: (step(), told())[1])

    return take


OPS = {"ours": lambda x: (x + 0).cos(), "plain": torch.cos}
COSINE = replace(
    SPECS["bias_act"], inputs=lambda s, make: {"x": make(s["B"], s["T"])}, options=no_options,
    ref=torch.cos,
)  # fmt: skip
"""An op that is correct in any dtype, to be chosen by its times alone."""


@pytest.mark.parametrize(
    ("plain", "ours", "worth", "chosen"),
    [
        (2.0, 1.0, 1.0, "ours"),
        (1.0, 1.0, 1.0, "ours"),
        (1.0, 1.1, 1.0, "plain"),
        (1.0, 1.1, 1.2, "ours"),
        (torch.OutOfMemoryError, 1.0, 1.0, "ours"),
        (1.0, torch.OutOfMemoryError, 1.0, "plain"),
        (torch.OutOfMemoryError, torch.OutOfMemoryError, 1.0, "plain"),
    ],
)
def test_the_faster_one_is_chosen(monkeypatch, takes, plain, ours, worth, chosen):
    monkeypatch.setitem(trials.TRIALS, "cosine", lambda _: (COSINE, {}, OPS))
    monkeypatch.setitem(choose.WORTH, "cosine", worth)
    takes(ours, plain)
    result = run_trial("cosine", SIZES, "cpu")
    assert result["chosen"] == chosen
    assert result["complaints"] == []


@pytest.mark.parametrize(
    ("wrong", "ours"),
    [
        ("output", lambda x: 1.01 * x.cos()),
        ("gradient", lambda x: backward_only(x, 1.01).cos()),
    ],
)
def test_what_is_wrong_is_never_chosen_nor_timed(monkeypatch, takes, wrong, ours):
    monkeypatch.setitem(trials.TRIALS, "cosine", lambda _: (COSINE, {}, {**OPS, "ours": ours}))
    takes()
    result = run_trial("cosine", SIZES, "cpu")
    assert (result["chosen"], result["milliseconds"]) == ("plain", {})
    assert any(line.startswith(wrong) for line in result["complaints"])


@pytest.mark.parametrize(("name", "kernel"), KERNELS.items())
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm": "rmsnorm", "num_kv_heads": 1, "window": 5, "softcap": 3.0, "activation": "swiglu"},
        {"bias": False, "document_mask": True, "eot_id": 0},
    ],
)
def test_our_kernels_pass_their_trials(takes, name, kernel, options):
    sizes = replace(SIZES, model=replace(TINY, **options))
    takes(1.0, 2.0)
    with launches(kernel):
        result = run_trial(name, sizes, "cpu")
    ours, plain = make_trial(name, sizes, "cpu", 2, 16).ops
    assert (result["chosen"], result["complaints"]) == (ours, [])
    assert result["milliseconds"] == {ours: 1000.0, plain: 2000.0}
    assert plain == choose.plain_name(name)


def test_timed_as_the_run_calls_it(takes):
    sizes = Sizes(TINY, 2, "bf16", True)
    trial = make_trial("loss", sizes, "cpu", 2, 16)
    takes(1.0)
    with mock.patch.object(torch, "compile", side_effect=lambda op, options: op) as compiled:
        choose.seconds(trial.ops["torch"], trial.inputs, sizes, "cpu")
    assert compiled.called


@pytest.mark.parametrize(
    ("options", "packed"), [({}, 1), ({"position": "rotary"}, 0), ({"qk_norm": True}, 0)]
)
def test_attention_is_timed_in_the_form_that_the_model_calls(monkeypatch, takes, options, packed):
    called = mock.Mock(side_effect=tables.PACKED_ATTENTION["triton"])
    monkeypatch.setitem(tables.PACKED_ATTENTION, "triton", called)
    sizes = replace(SIZES, model=replace(TINY, **options))
    chosen = tables.select(OpsConfig(attention="triton"), "cpu")
    trial = make_trial("attention", sizes, "cpu", 2, 16)
    takes(1.0)
    choose.seconds(trial.ops["triton"], trial.inputs, sizes, "cpu")
    assert called.call_count == packed
    GPT(sizes.model, chosen)(torch.zeros(2, 16, dtype=torch.int64))
    assert called.call_count == 2 * packed
    biases = [call.kwargs["input_bias"].shape for call in called.call_args_list]
    assert biases == [(96,)] * 2 * packed
    # its gradient is one tensor for PyTorch's op as well
    assert trial.inputs["qkv"].shape == (2, 16, 6, 16)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_norm_is_tried_in_the_form_that_the_model_calls(dropout):
    model = replace(TINY, residual_dropout=dropout)
    tried = make_trial("norm", replace(SIZES, model=model), "cpu", 2, 16).inputs
    chosen = tables.select(OpsConfig(norm="triton"), "cpu")
    fused_bias = GPT(model, chosen).h[0].attn.c_proj.fused_bias
    assert ("input_bias" in tried) == (fused_bias is not None) == (dropout == 0)


@pytest.mark.parametrize(("narrow", "dtype"), [(False, torch.float32), (True, torch.bfloat16)])
def test_the_residual_is_tried_in_the_dtype_that_it_has(narrow, dtype):
    sizes = replace(SIZES, precision="bf16", narrow_residual=narrow)
    assert make_trial("norm", sizes, "cpu", 2, 16).inputs["residual"].dtype == dtype


# --- parent and child -----------------------------------------------------------------------------


@pytest.fixture
def on_cuda(monkeypatch, tmp_path):
    """Runs `choose` as on a GPU, with a child that runs `code`; returns the warnings."""
    monkeypatch.setenv("FASTGPT_CACHE", str(tmp_path))
    monkeypatch.setattr(choose.device, "device_name", lambda on: "a GPU")

    def run(code, config=OpsConfig(), sizes=SIZES):  # noqa: B008 - frozen
        said = []
        monkeypatch.setattr(choose, "CHILD", ["-c", code])
        chosen, results = choose.choose(config, sizes, "cuda", said.append)
        return chosen, results, said

    return run


# as it is, but that it has a CPU, and no clock for GPUs
CHILD = """
import io, sys
from fastgpt.autotune import choose, trials
choose.timer = lambda step: 1.0
sys.stdin = io.StringIO(sys.stdin.read().replace("cuda", "cpu"))
{}
choose.main()
"""
RESULT = {"chosen": "triton", "complaints": [], "milliseconds": {}}
# answers without a trial, but for what is said in a case
ANSWERS = f"""
import json, sys, time
for name in sys.argv[1:]:
    CASE
    print(json.dumps({{name: {RESULT}}}), 5, sep="\\n", flush=True)
"""


def test_child_tries_what_is_auto_and_the_answer_is_remembered(on_cuda):
    asked = OpsConfig(attention="sdpa")
    chosen, results, said = on_cuda(CHILD.format(""), asked)
    assert (chosen.attention, chosen.norm, chosen.loss) == ("sdpa", "triton", "chunked")
    assert results.keys() == {"norm", "loss", "activation"}
    (line,) = said
    assert "once" in line
    assert on_cuda("raise SystemExit(1)", asked) == (chosen, results, [])


def test_other_sizes_or_kernels_are_tried_anew(on_cuda, monkeypatch, tmp_path):
    monkeypatch.setattr(choose, "KERNELS", tmp_path)
    keys = [choose._key(SIZES, "cuda"), choose._key(replace(SIZES, batch=3), "cuda")]
    for name in ("op/device.py", "op/tuning/sm_90.json", "op/notes.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
        code_hash.cache_clear()
        keys.append(choose._key(SIZES, "cuda"))
    assert len(set(keys[:4])) == 4
    assert keys[4] == keys[3]


@pytest.mark.parametrize(
    ("ending", "reason"),
    [
        ("import os; os.abort()", "ended with code -6"),
        ("sys.exit('Error: illegal')", "code 1: Error: illegal"),
        ("time.sleep(60)", "did not end within 5 s"),
    ],
    ids=["abort", "error", "hang"],
)
def test_a_child_that_fails_leaves_pytorchs_ops_and_says_so(on_cuda, monkeypatch, ending, reason):
    monkeypatch.setattr(choose, "TIMEOUT", 5.0)
    norm = json.dumps({"norm": RESULT})
    code = ANSWERS.replace("CASE", f"print({norm!r}, flush=True); {ending}")
    chosen, _, said = on_cuda(code)
    names = tables.select(chosen, "cuda").names
    assert (names["attention"], names["norm"], names["loss"]) == ("sdpa", "triton", "torch")
    assert len(said) == 4
    for line, op in zip(said[1:], ("attention", "loss", "activation"), strict=True):
        assert line.startswith(f"--ops.{op}: our kernels did not pass")
        assert reason in line
    *_, said = on_cuda(code)
    assert len(said) == 4  # what was not answered is tried once more


def test_an_error_of_a_trial_is_its_reason(on_cuda):
    raises = (
        "def fail(*_): raise RuntimeError('illegal\\n\\nSearch for it')\nchoose.run_trial = fail"
    )
    _, results, _ = on_cuda(CHILD.format(raises))
    reasons = {line for result in results.values() for line in result["complaints"]}
    assert reasons == {"the trial ended with code 1: RuntimeError: illegal"}


def test_an_op_whose_trial_fails_takes_no_other_with_it(on_cuda):
    chosen, _, said = on_cuda(ANSWERS.replace("CASE", "assert name != 'norm', 'no such kernel'"))
    assert (chosen.attention, chosen.norm, chosen.loss) == ("triton", "torch", "triton")
    assert [line for line in said if line.startswith("--ops.")] == said[1:2]
    assert "no such kernel" in said[1]


def test_on_a_cpu_nothing_is_tried():
    config = OpsConfig()
    assert choose.choose(config, SIZES, "cpu", partial(pytest.fail)) == (config, {})
