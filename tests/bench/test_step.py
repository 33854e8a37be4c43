"""Benchmark of the step: trainers in processes of their own, llm.c's output, parts."""

import os
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from bench import parts, records, step, trainers
from fastgpt.config.model import ModelConfig
from fastgpt.config.recipes import RECIPES
from fastgpt.data.tokenizers import CharTokenizer
from fastgpt.errors import UserError

# A model.py with nanoGPT's interface and next to nothing in it; only the first that is built works.
STAND_IN = """
import os, torch
from types import SimpleNamespace as GPTConfig
class GPT(torch.nn.Linear):
    def __init__(self, config):
        super().__init__(1, config.vocab_size)
        os.mkdir(__file__ + ".built")
    def configure_optimizers(self, *_):
        return torch.optim.AdamW(self.parameters())
    def forward(self, x, y):
        logits = super().forward(x[..., None].float())
        return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
"""


def asked(tmp_path, *names, **options) -> step.StepBench:
    common = {"device": "cpu", "tiny": True, "rounds": 1, "batch": (4,), "out": tmp_path / "out"}
    return step.StepBench(**{**common, "implementations": names, **options})


@pytest.mark.slow
def test_trainers_take_turns_and_one_that_fails_is_named(tmp_path, capfd, one_thread):
    (tmp_path / "model.py").write_text(STAND_IN)
    names = ("fastgpt", "eager", "nanogpt", "nanogpt fp32")
    bench = asked(tmp_path, *names, nanogpt=tmp_path, parallel_start=True, explain=True, trace=True)
    rows = {row["implementation"]: row for row in step.run(bench)}
    assert len(records.read(tmp_path / "out")) == len(rows)
    assert "--llmc PATH" in rows.pop("llm.c")["why"]
    assert sorted(rows) == sorted(names)
    (failed,) = (row for row in rows.values() if row["figure"] is None)
    assert failed["implementation"].startswith("nanogpt")
    assert "FileExistsError" in failed["why"]
    del rows[failed["implementation"]]
    for row in rows.values():
        assert (row["case"], row["shape"]) == ("step/shakespeare-char/B=4", {"B": 4, "T": 8})
        assert row["figure"]["samples"] == step.TIMED_STEPS
        assert row["tok_per_s"] == pytest.approx(32 / row["figure"]["p50"])
        assert min(row["first_step_s"], row["host"]["p50"], row["parts"]["optimizer"]) > 0
        assert row["peak_bytes"] > 1e7
    assert rows["fastgpt"]["parts"]["GEMM"] > rows["fastgpt"]["limits"]["GEMM"] > 0
    assert rows["fastgpt"]["ops"]["attention"] == "blocked"
    assert (tmp_path / "out" / "fastgpt-4.trace.json.gz").exists()
    assert capfd.readouterr().out.count("ms over the") == 3


@pytest.mark.parametrize(
    ("names", "message"), [((), "no trainer took a"), (("fastgpt", "eager"), "fastgpt took no")]
)
def test_without_a_figure_of_ours_the_command_fails(tmp_path, monkeypatch, names, message):
    figure = dict.fromkeys(("p20", "p50", "p80"), 1.0)
    more = {"tok_per_s": 1.0, "mfu": 0.1, "peak_bytes": None}
    rows = [records.record("step/baby/B=1", name, figure, **more) for name in names[1:]]
    monkeypatch.setattr(step, "measured", lambda *_: iter(rows))
    with pytest.raises(UserError, match=message):
        step.run(asked(tmp_path, *names))
    assert [row["figure"] for row in records.read(tmp_path / "out")] == [figure] * len(rows)


PLAN = trainers.Benchmark(config=RECIPES["gpt2-124m"][1], on="cuda", precision="bf16")


def test_turns_alternate_and_a_trainer_that_fails_keeps_its_reason(monkeypatch, tmp_path):
    order = []

    def process(folder, name, benchmark, rounds):
        for number in range(3 if name == "B" else 9):
            order.append(f"{name}{number}")
            yield {"number": number}
        yield {"why": "out of memory"}

    monkeypatch.setattr(step, "process", process)
    found = dict(step.in_turns(("A", "B"), PLAN, tmp_path, rounds=2, parallel_start=False))
    assert order == ["A0", "A1", "B0", "B1", "A2", "B2", "A3", "A4", "A5"]
    assert found == {"A": {"number": 5}, "B": {"why": "out of memory"}}


def test_a_process_that_dies_is_noticed(monkeypatch):
    monkeypatch.setattr(step, "serve", os.abort)
    assert "ended early" in [*step.process()][-1]["why"]


def test_a_profiler_that_sees_nothing_is_an_error(monkeypatch):
    monkeypatch.setattr(parts, "_of_ops", lambda events: ({}, 0.0, []))
    with pytest.raises(UserError, match="saw no kernel"):
        parts.profile(lambda: None, "cpu")


def test_random_text_has_the_vocabulary_it_should(tmp_path):
    config = trainers.base_config("gpt2-124m", "cpu", tmp_path / "text.txt")
    tokenizer = CharTokenizer((tmp_path / "text.txt").read_text(encoding="utf-8"))
    assert tokenizer.vocab_size == config.model.vocab_size == 50_257


# In the form of their printf; the numbers are invented.
MS = (900, 100, 110, 120)
ON_GPU = "allocated 237 MiB for model parameters\nallocating 1000 MiB for activations\n" + "".join(
    f"step {n:4}/4 | loss 10.95 (+nanz)| {ms}.00 ms | 50.1% bf16 MFU\n" for n, ms in enumerate(MS)
)
ON_CPU = "".join(f"step {n}: train loss 10.95 (took {ms}.0 ms)\n" for n, ms in enumerate(MS))
GPT2 = ModelConfig(num_layers=2, num_heads=2, dim=16, context=64, vocab_size=50_257)


@pytest.fixture
def llmc(tmp_path, monkeypatch):
    """Runs a shell script as one of llm.c's programs."""
    monkeypatch.setattr(trainers, "LLMC_STEPS", 4)
    monkeypatch.setattr(trainers, "PATIENCE_S", 3.0)

    def run(script: str, on: str):
        path = tmp_path / ("train_gpt2cu" if on == "cuda" else "train_gpt2")
        if script:
            path.write_text(f"#!/bin/sh\n{script}\n")
            path.chmod(0o755)
        plan = replace(PLAN, on=on, config=replace(PLAN.config, model=GPT2))
        return trainers.run_llmc(tmp_path, trainers.with_batch(plan, 4))

    return run


@pytest.mark.parametrize(("on", "printed"), [("cuda", ON_GPU), ("cpu", ON_CPU)])
def test_llmc_is_given_weights_and_tokens_and_stopped(tmp_path, llmc, on, printed):
    copy = f'cp -r dev *.bin {tmp_path} 2>/dev/null; echo "$@" >{tmp_path}/asked'
    found = llmc(f"{copy}\necho '{printed}'\nexec sleep 60", on)
    assert found["figure"]["p50"] == pytest.approx(0.110)  # the first step warms up
    assert found["figure"]["samples"] == 3
    (path,) = tmp_path.rglob("tiny_shakespeare_train.bin")
    tokens = np.fromfile(path, np.uint16, offset=1024)
    assert tokens.max() < 50_257
    assert len(tokens) == np.fromfile(path, np.int32)[2]
    if on == "cuda":
        assert found["peak_bytes"] == 1237 * 2**20
        assert "-e d2 -b 4 -t 64 -d 256 -x 4" in (tmp_path / "asked").read_text()
        return
    header = np.fromfile(tmp_path / "gpt2_124M.bin", np.int32, 256)
    assert header[:8].tolist() == [20240326, 3, 64, 50257, 2, 2, 16, 50304]
    weights = np.fromfile(tmp_path / "gpt2_124M.bin", np.float32, offset=1024)
    assert len(weights) == sum(p.numel() for p in trainers.GPT2(GPT2).parameters())


@pytest.mark.parametrize(
    ("on", "script", "message"),
    [
        ("cuda", "echo no GPU >&2; exit 3", "0 of 4 steps in .* s, last line: no GPU"),
        ("cuda", "exec sleep 9", "0 of 4 steps in 3.0 s, last line: nothing"),
        ("cuda", "", "expected llm.c's train_gpt2cu, found nothing"),
        ("cpu", f"echo '{ON_CPU[:80]}'", "2 of 4 steps in .* s, last line: step 1"),
    ],
)
def test_llmc_that_fails_is_an_error_in_one_line(llmc, on, script, message):
    with pytest.raises(UserError, match=message):
        llmc(script, on)


@pytest.mark.parametrize(
    ("part", "names"),
    [
        ("GEMM", "nvjet_hsh sm90_xmma_gemm cutlass_80_tensorop aten::addmm mkldnn::_linear"),
        ("attention", "flash_fwd_kernel sdpa_sm90 _attention_bwd_dkv aten::bmm aten::_softmax"),
        ("norm", "_norm_fwd_kernel triton_fused_add_native_layer_norm_3 vectorized_layer_norm"),
        ("loss", "aten::_log_softmax _cross_entropy_fwd_bwd triton_fused__log_softmax_nll_loss"),
        ("optimizer", "multi_tensor_apply_kernel<FusedAdam> aten::_fused_adamw_"),
        ("other", "triton_poi_fused_gelu_4 aten::embedding"),
    ],
)
def test_kernels_are_told_apart_by_name(part, names):
    assert {parts.part_of(name) for name in names.split()} == {part}


def test_what_costs_most_over_its_limit_comes_first():
    spent = dict.fromkeys(parts.PARTS, 1.0) | {"GEMM": 10.0, "norm": 6.0, "host gap": 5.0}
    lines = parts.explain(spent, dict.fromkeys(parts.PARTS, 0.5) | {"GEMM": 8.0, "host gap": 0.0})
    assert [line.split(":")[0] for line in lines] == ["norm", "host gap", "GEMM"]


def test_kernels_of_a_gpu_are_summed_by_part_and_ranges_around_them_are_not():
    times = {"_attention_fwd": (8, 12), "nvjet": (0, 10), "fastgpt::steps": (0, 100)}
    spans = {name: SimpleNamespace(start=a, end=b) for name, (a, b) in times.items()}
    events = [SimpleNamespace(name=name, time_range=span) for name, span in spans.items()]
    spent, busy, kernels = parts._of_kernels(events)
    assert (spent, busy) == ({"GEMM": 10, "attention": 4}, 12)
    assert kernels[0] == ("nvjet", 10 / parts.STEPS / 1e3, 1 / parts.STEPS)
