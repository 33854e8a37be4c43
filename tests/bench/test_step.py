"""Benchmark of the step: trainers in processes of their own, llm.c's output, parts."""

import os
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from bench import count, parts, records, step, trainers
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
    assert sorted(rows) == sorted(names)
    (failed,) = (row for row in rows.values() if row["figure"] is None)
    assert failed["implementation"].startswith("nanogpt")
    assert "FileExistsError" in failed["why"]
    del rows[failed["implementation"]]
    for row in rows.values():
        assert (row["case"], row["shape"]) == ("step/shakespeare-char/B=4", {"B": 4, "T": 8})
        assert row["figure"]["samples"] == step.TIMED_STEPS
        assert row["tok_per_s"] == pytest.approx(32 / row["figure"]["p50"])
        assert min(row["first_step_s"], row["parts"]["optimizer"], row["mfu"]) > 0
        assert row["peak_bytes"] > 1e7
    assert rows["fastgpt"]["parts"]["GEMM"] > rows["fastgpt"]["limits"]["GEMM"] > 0
    assert rows["fastgpt"]["ops"]["attention"] == "blocked"
    assert (tmp_path / "out" / "fastgpt-4.trace.json.gz").exists()
    assert "1.00x fastgpt's" in (printed := capfd.readouterr().out)
    assert all(printed.count(f"{part} ") >= 1 for part in parts.PARTS)  # of the table of parts


def test_without_a_figure_of_ours_the_command_fails(tmp_path, monkeypatch):
    figure = dict.fromkeys(("p20", "p50", "p80"), 1.0)
    row = records.record("step/baby/B=1", "eager", figure, tok_per_s=1, mfu=0.1, peak_bytes=None)
    monkeypatch.setattr(step, "measured", lambda *_: iter([dict(row)]))
    assert step.run(asked(tmp_path, "eager")) == [row]
    with pytest.raises(UserError, match="fastgpt took no step"):
        step.run(asked(tmp_path, "fastgpt", "eager"))
    assert [row["figure"] for row in records.read(tmp_path / "out")] == [figure] * 2


PLAN = trainers.Benchmark(config=RECIPES["gpt2-124m"][1], on="cuda", precision="bf16")


def test_turns_alternate_and_a_trainer_that_fails_keeps_its_reason(monkeypatch, tmp_path):
    order = []

    def process(folder, name, benchmark, rounds):
        for number in range(3 if name == "B" else 9):
            order.append(f"{name}{number}")
            yield {"number": number}
        yield {"why": "out of memory"}

    monkeypatch.setattr(step, "process", process)
    found = dict(step.in_turns(("A", "B"), PLAN, step.StepBench(rounds=2), tmp_path))
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


# in the form of its printf; the numbers are invented
PRINTED = "allocated 237 MiB for model parameters\nallocating 1000 MiB for activations\n" + "".join(
    f"step {n:4}/20 | loss 10.95 (+nanz)| {ms}.00 ms | 50.1% bf16 MFU\n"
    for n, ms in enumerate([900, *[110] * 19])
)


def run_llmc(folder, script):
    """Runs a shell script as llm.c's program."""
    (folder / "train_gpt2cu").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "train_gpt2cu").chmod(0o755)
    model = ModelConfig(num_layers=2, num_heads=2, dim=16, context=64, vocab_size=50_257)
    plan = replace(PLAN, config=replace(PLAN.config, model=model))
    return trainers.run_llmc(folder, trainers.with_batch(plan, 4))


def test_llmc_is_given_tokens_and_sizes(tmp_path):
    copy = f'cp -r dev {tmp_path}; echo "$@" >{tmp_path}/asked'
    found = run_llmc(tmp_path, f"{copy}\necho '{PRINTED}'")
    assert found["figure"]["p50"] == pytest.approx(0.110)  # the first step warms up
    assert (found["figure"]["samples"], found["peak_bytes"]) == (19, 1237 * 2**20)
    (path,) = tmp_path.rglob("tiny_shakespeare_train.bin")
    tokens = np.fromfile(path, np.uint16, offset=1024)
    assert tokens.max() < 50_257
    assert len(tokens) == np.fromfile(path, np.int32)[2] == 20 * 256 + 1
    assert "-e d2 -b 4 -t 64 -d 256 -x 20" in (tmp_path / "asked").read_text()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo no GPU >&2; exit 3", "0 of 20 steps, last line: no GPU"),
        ("exec sleep 9", "0 of 20 steps, last line: nothing"),
        (f"echo '{PRINTED[:200]}'", "2 of 20 steps, last line: s"),
    ],
)
def test_llmc_that_fails_is_an_error_in_one_line(tmp_path, monkeypatch, script, message):
    monkeypatch.setattr(trainers, "PATIENCE_S", 2)
    with pytest.raises(UserError, match=message):
        run_llmc(tmp_path, script)


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


def test_parts_are_told_with_limits_and_counts_the_furthest_over_its_limit_first(capsys):
    counts = {part: dict.fromkeys(count.FIELDS, 0) for part in count.PARTS}
    counts["projections"] |= {"flops": 6e12, "read": 2e9}  # 10 ms, 1 ms
    counts["head and loss"] |= {"flops": 3e12, "read": 8e9, "written": 4e9}  # 5 ms, 6 ms
    foretold = parts.foretold(counts, {"matmul": 600e12, "copy": 2e12})
    assert foretold == dict.fromkeys(parts.COUNTED, 0) | {"GEMM": pytest.approx(16)}
    assert {x for y in parts.COUNTED.values() for x in y} == {*count.PARTS} - {"collectives"}
    spent, limits = {"GEMM": 10.0, "norm": 6.0, "loss": 5.0}, {"GEMM": 8.0, "norm": 0.5, "loss": 0}
    step.explain({
        "case": "step", "implementation": "fastgpt", "parts": spent, "limits": limits,
        "foretold": foretold,
    })  # fmt: skip
    found = [line.split()[1:10:2] for line in capsys.readouterr().out.splitlines()[4:7]]
    assert [line[0] for line in found] == ["norm", "loss", "GEMM"]
    assert found[2] == ["GEMM", "10.00", "8.00", "2.00", "16.00"]


def test_kernels_of_a_gpu_are_summed_by_part_and_ranges_around_them_are_not():
    times = {"_attention_fwd": (8, 12), "nvjet": (0, 10), "fastgpt::steps": (0, 100)}
    spans = {name: SimpleNamespace(start=a, end=b) for name, (a, b) in times.items()}
    events = [SimpleNamespace(name=name, time_range=span) for name, span in spans.items()]
    spent, busy, kernels = parts._of_kernels(events)
    assert (spent, busy) == ({"GEMM": 10, "attention": 4}, 12)
    assert kernels[0] == ("nvjet", 10 / parts.STEPS / 1e3, 1 / parts.STEPS)
