"""Benchmark of the step: trainers in processes of their own, llm.c's output, parts."""

import os
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from bench import parts, records, step, trainers
from fastgpt.config.model import ModelConfig
from fastgpt.config.recipes import RECIPES
from fastgpt.errors import UserError

# A model.py with nanoGPT's interface and next to nothing in it; only the first that is built works.
STAND_IN = """
import os, torch
from types import SimpleNamespace as GPTConfig
class GPT(torch.nn.Embedding):
    def __init__(self, config):
        super().__init__(config.vocab_size, config.vocab_size)
        os.mkdir(__file__ + ".built")
    def configure_optimizers(self, *_):
        return torch.optim.AdamW(self.parameters())
    def forward(self, x, y):
        return None, torch.nn.functional.cross_entropy(super().forward(x).mT, y)
"""


def asked(tmp_path, *names, **options) -> step.StepBench:
    common = {"device": "cpu", "tiny": True, "rounds": 1, "batch": (4,), "out": tmp_path / "out"}
    return step.StepBench(**common, implementations=names, **options)


@pytest.mark.slow
def test_trainers_take_turns_and_one_that_fails_is_named(tmp_path, one_thread):
    (tmp_path / "model.py").write_text(STAND_IN)
    names = ("fastgpt", "eager", "nanogpt", "nanogpt fp32")
    bench = asked(tmp_path, *names, nanogpt=tmp_path, parallel_start=True, explain=True, trace=True)
    rows = {row["implementation"]: row for row in step.run(bench)}
    assert sorted(rows) == sorted(names)
    assert len(records.read(tmp_path / "out")) == len(rows)
    (failed,) = (name for name, row in rows.items() if row["figure"] is None)
    assert failed.startswith("nanogpt")
    assert "FileExistsError" in rows.pop(failed)["why"]
    for row in rows.values():
        assert (row["case"], row["shape"]) == ("step/shakespeare-char/B=4", {"B": 4, "T": 8})
        assert row["figure"]["samples"] == step.TIMED_STEPS
        assert row["tok_per_s"] == pytest.approx(32 / row["figure"]["p50"])
        assert min(row["first_step_s"], row["parts"]["optimizer"], row["mfu"]) > 0
        assert row["peak_bytes"] > 1e7
    assert rows["fastgpt"]["parts"]["GEMM"] > rows["fastgpt"]["limits"]["GEMM"] > 0
    assert (tmp_path / "out" / "fastgpt-4.trace.json.gz").exists()


def test_without_a_figure_of_ours_the_command_fails(tmp_path, monkeypatch):
    figure = dict.fromkeys(("p20", "p50", "p80"), 1.0)
    row = records.record("step/baby/B=1", "eager", figure, tok_per_s=1, mfu=0.1, peak_bytes=None)
    monkeypatch.setattr(step, "measured", lambda *_: iter([row]))
    with pytest.raises(UserError, match="fastgpt took no step"):
        step.run(asked(tmp_path, "fastgpt", "eager"))
    assert [row["figure"] for row in records.read(tmp_path / "out")] == [figure]


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


# In the form of their printf; the numbers are invented.
MS = (900, 100, 110, 120)
ON_GPU = "allocated 237 MiB for model parameters\nallocating 1000 MiB for activations\n" + "".join(
    f"step {n:4}/4 | loss 10.95 (+nanz)| {ms}.00 ms | 50.1% bf16 MFU\n" for n, ms in enumerate(MS)
)
ON_CPU = "".join(f"step {n}: train loss 10.95 (took {ms}.0 ms)\n" for n, ms in enumerate(MS))
GPT2 = ModelConfig(num_layers=2, num_heads=2, dim=16, context=64, vocab_size=50_257)


@pytest.mark.parametrize(("on", "printed"), [("cuda", ON_GPU), ("cpu", ON_CPU)])
def test_llmc_is_given_weights_and_tokens_and_stopped(tmp_path, monkeypatch, on, printed):
    monkeypatch.setattr(trainers, "LLMC_STEPS", 4)
    path = tmp_path / ("train_gpt2cu" if on == "cuda" else "train_gpt2")
    copy = f'cp -r dev *.bin {tmp_path} 2>/dev/null; echo "$@" >{tmp_path}/asked'
    path.write_text(f"#!/bin/sh\n{copy}\necho '{printed}'\nexec sleep 60\n")
    path.chmod(0o755)
    plan = replace(PLAN, on=on, config=replace(PLAN.config, model=GPT2))
    found = trainers.run_llmc(tmp_path, trainers.with_batch(plan, 4))
    assert found["figure"]["p50"] == pytest.approx(0.110)  # the first step warms up
    assert found["figure"]["samples"] == 3
    (path,) = tmp_path.rglob("tiny_shakespeare_train.bin")
    assert np.fromfile(path, np.int32)[2] == 4 * 256 + 1
    if on == "cuda":
        assert found["peak_bytes"] == 1237 * 2**20
        assert "-e d2 -b 4 -t 64 -d 256 -x 4" in (tmp_path / "asked").read_text()
    else:
        weights = np.fromfile(tmp_path / "gpt2_124M.bin", np.float32, offset=1024)
        assert len(weights) == sum(p.numel() for p in trainers.GPT2(GPT2).parameters())


def test_kernels_of_a_gpu_are_summed_by_part_and_ranges_around_them_are_not():
    times = {"_attention_fwd": (8, 12), "nvjet": (0, 10), "ProfilerStep#1": (0, 100)}
    assert parts.part_of("_cross_entropy_fwd_bwd") == "loss"
    spans = [(name, SimpleNamespace(start=a, end=b)) for name, (a, b) in times.items()]
    events = [SimpleNamespace(name=name, time_range=span) for name, span in spans]
    spent, busy, kernels = parts._of_kernels(events)
    assert (spent, busy) == ({"GEMM": 10, "attention": 4}, 12)
    assert kernels[0] == ("nvjet", 10 / parts.STEPS / 1e3, 1 / parts.STEPS)
