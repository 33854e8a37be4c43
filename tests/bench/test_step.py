"""Benchmark of the step: implementations in processes of their own, llm.c's output, parts."""

import multiprocessing
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bench import implementations, parts, records, step, trainers
from bench.implementations import PLAIN_OPS, TRITON_OPS, Implementation, write_text
from fastgpt.config.config import OpsConfig
from fastgpt.config.model import ModelConfig
from fastgpt.config.recipes import RECIPES
from fastgpt.data.tokenizers import CharTokenizer
from fastgpt.errors import UserError
from fastgpt.model.build import build_model
from fastgpt.ops.tables import select

# A model.py with nanoGPT's interface and next to nothing in it; only the first that is built works.
STAND_IN = """
import os
from types import SimpleNamespace as GPTConfig
import torch
from torch.nn import functional as F

class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        os.mkdir(__file__ + ".built")
        self.table = torch.nn.Embedding(config.vocab_size, config.vocab_size)

    def configure_optimizers(self, decay, lr, betas, device):
        return torch.optim.AdamW(self.parameters(), lr=lr, betas=betas)

    def forward(self, x, y):
        logits = self.table(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), y.flatten())
"""


def asked(tmp_path, *implementations_, **options) -> step.StepBench:
    common = {"device": "cpu", "tiny": True, "rounds": 1, "batch": (4,), "out": tmp_path / "out"}
    return step.StepBench(**{**common, "implementations": implementations_, **options})


@pytest.mark.slow
def test_implementations_take_turns_and_one_that_fails_is_named(tmp_path, capfd, one_thread):
    (tmp_path / "model.py").write_text(STAND_IN)
    names = ("fastgpt", "eager", "nanogpt", "nanogpt fp32")
    bench = asked(tmp_path, *names, nanogpt=tmp_path, parallel_start=True, explain=True)
    path = step.run(bench)
    rows = {row["implementation"]: row for row in records.read(path.parent)}
    assert "--llmc PATH" in rows.pop("llm.c")["reason"]
    assert sorted(rows) == sorted(names)
    (failed,) = (row for row in rows.values() if row["kind"] == "missing")
    assert failed["implementation"].startswith("nanogpt")
    assert "FileExistsError" in failed["reason"]
    del rows[failed["implementation"]]
    for row in rows.values():
        assert (row["kind"], row["shape"]) == ("step", {"B": 4, "T": 8})
        assert row["seconds"]["samples"] == implementations.TIMED_STEPS
        assert row["tok_per_s"] == pytest.approx(32 / row["seconds"]["p50"])
        assert row["peak_bytes"] > 1e7
        assert row["first_step_s"] > 0
        assert row["parts"]["optimizer"] > 0
        assert row["mfu_convention"].startswith("6N")
    assert rows["fastgpt"]["parts"]["GEMM"] > 0
    assert rows["fastgpt"]["ops"]["attention"] == "blocked"
    printed = capfd.readouterr().out
    assert printed.count("ms over the") == 3
    assert f"{failed['implementation']}: not measured: FileExistsError" in printed


FIGURES = {"seconds": dict.fromkeys(("p20", "p50", "p80"), 1.0), "tok_per_s": 1.0, "mfu": 0.1}


@pytest.mark.parametrize(
    ("asked_for", "kind", "figures", "message"),
    [
        (("fastgpt",), "missing", {"reason": "out of memory"}, "no implementation took a"),
        (("fastgpt", "eager"), "step", FIGURES, "fastgpt took no step"),
        (("eager",), "step", FIGURES, ""),
    ],
)
def test_without_a_figure_of_ours_the_command_fails_and_compares_with_nobody(
    tmp_path, monkeypatch, capsys, asked_for, kind, figures, message
):
    row = {"case": "step/baby/B=1", "implementation": asked_for[-1], **figures}
    monkeypatch.setattr(step, "time_implementations", lambda *_: iter([(kind, row)]))
    with pytest.raises(UserError, match=message) if message else nullcontext():
        step.run(asked(tmp_path, *asked_for))
    assert "1.00x" not in capsys.readouterr().out
    assert records.read(tmp_path / "out")[0]["kind"] == kind


@pytest.fixture
def no_process(monkeypatch):
    monkeypatch.setattr(Implementation, "_start", lambda self: None)
    monkeypatch.setattr(Implementation, "stop", lambda self: None)


@pytest.fixture
def script(no_process, monkeypatch):
    """Replaces the implementations' processes by scripted answers, and records the requests."""
    answers = {
        "": {"first_step_s": 9.0},
        "turn": {"device_s": [2.0, 4.0], "host_s": [1.0, 1.0]},
        "peak": {"peak_bytes": 5},
    }
    asked = []

    def ask(self, word=""):
        asked.append(self.name + word)
        answer = answers.get(word, {"failed": f"no {word}"})
        answer = answer(self) if callable(answer) else answer
        self.failed = answer.get("failed", "")
        return {} if self.failed else answer

    monkeypatch.setattr(Implementation, "ask", ask)
    return SimpleNamespace(answers=answers, asked=asked)


PLAN = implementations.Benchmark(config=RECIPES["gpt2-124m"][1], on="cuda", precision="bf16")


def test_turns_alternate_the_first_does_not_count_and_times_stand_without_parts(script):
    figures = dict(implementations.run_interleaved(("A", "B"), PLAN, Path(), rounds=2))["A"]
    assert script.asked[:8] == ["A", "B", "Bturn", "Aturn", "Aturn", "Bturn", "Bturn", "Aturn"]
    assert (figures["no_parts"], figures["peak_bytes"]) == ("no parts", 5)
    assert figures["all_seconds"] == [2.0, 4.0] * 2
    assert (figures["seconds"]["p50"], figures["host_s"]["p50"]) == (3.0, 1.0)


def test_of_two_starts_the_second_is_warm_and_without_a_peak_there_are_no_figures(script):
    seconds = iter([9.0, 2.0, 9.0])
    script.answers[""] = lambda _: {"first_step_s": next(seconds)}
    found = dict(implementations.run_interleaved(("A",), PLAN, Path(), rounds=1, starts=2))["A"]
    assert (found["first_step_s"], found["first_step_warm_s"]) == (9.0, 2.0)
    del script.answers["peak"]
    found = dict(implementations.run_interleaved(("A",), PLAN, Path(), rounds=1))
    assert found == {"A": {"reason": "no peak"}}


def test_a_profiler_that_sees_nothing_is_an_error(monkeypatch):
    monkeypatch.setattr(parts, "_of_ops", lambda events: {"busy": 0.0})
    with pytest.raises(UserError, match="saw no kernel"):
        parts.profile(lambda: None, "cpu")


def test_a_process_that_dies_is_noticed(no_process):
    implementation = Implementation("eager", None, Path())
    implementation.pipe, there = multiprocessing.Pipe()
    there.close()
    assert implementation.ask("turn") == {}
    assert "ended early" in implementation.failed


def test_every_op_with_kernels_of_ours_is_asked_to_run_them():
    ops = TRITON_OPS
    assert (ops.attention, ops.loss, ops.kernels) == ("triton", "chunked", "triton")
    assert set(asdict(PLAIN_OPS).values()) == {"torch"}


def test_random_text_has_the_vocabulary_it_should(tmp_path):
    vocab = 50_257
    write_text(tmp_path / "text.txt", vocab, vocab + 1000)
    text = (tmp_path / "text.txt").read_text(encoding="utf-8")
    tokenizer = CharTokenizer(text)
    assert tokenizer.vocab_size == vocab
    assert len(tokenizer.encode(text)) == vocab + 1000


# --- llm.c ----------------------------------------------------------------------------------------

# In the form of its printf; the numbers are invented.
OUTPUT = """| max_sequence_length T | 1024 |
allocated 237 MiB for model parameters
allocating 1000 MiB for activations
step    1/4 | loss 10.950000 (+nanz)| norm 15.0 (+nanz)| lr 3.00e-04 | 900.00 ms | -100.0% bf16 MFU | 18204 tok/s
step    2/4 | loss 10.900000 (+nanz)| norm 12.0 (+nanz)| lr 3.00e-04 | 100.00 ms | 50.1% bf16 MFU | 163840 tok/s
step    3/4 | loss 10.800000 (+nanz)| norm 9.0 (+nanz)| lr 3.00e-04 | 110.00 ms | 48.9% bf16 MFU | 163000 tok/s
step    4/4 | loss 10.700000 (-0.52z)| norm 8.0 (+1.20z)| lr 3.00e-04 | 120.00 ms | 47.0% bf16 MFU | 160000 tok/s
"""  # noqa: E501


def program(folder, name, script):
    """Makes a shell script as one of llm.c's programs; an empty folder where there is none."""
    if not script:
        return folder
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)
    return folder / name


def run_llmc(folder, script, on="cuda"):
    if on == "cpu":
        return trainers.run_llmc_on_cpu(program(folder, "train_gpt2", script), TINY_GPT2, steps=4)
    sizes = {"layers": 12, "batch": 16, "context": 1024, "steps": 4}
    return trainers.run_llmc(program(folder, "train_gpt2cu", script), folder, **sizes)


def test_llmc_is_run_and_its_figures_are_read(tmp_path):
    found = run_llmc(tmp_path, f"echo \"$@\" >{tmp_path}/asked\ncat <<'END'\n{OUTPUT}END")
    assert found["seconds"]["p50"] == pytest.approx(0.110)  # the first step warms up
    assert found["seconds"]["samples"] == 3
    assert found["peak_bytes"] == 1237 * 2**20
    assert "-e d12 -b 16 -t 1024 -d 16384 -x 4" in (tmp_path / "asked").read_text()


ON_CPU = """num_layers: 2
step 0: train loss 10.95 (took 900.0 ms)
step 1: train loss 10.90 (took 100.0 ms)
step 2: train loss 10.80 (took 110.0 ms)
step 3: train loss 10.70 (took 120.0 ms)
"""
TINY_GPT2 = ModelConfig(num_layers=2, num_heads=2, dim=16, context=64, vocab_size=300)


def test_llmcs_program_for_cpus_is_given_weights_and_tokens_and_stopped(tmp_path):
    files = "gpt2_124M.bin dev/data/tinyshakespeare/tiny_shakespeare_train.bin"
    copies = f"cp {files} {tmp_path}\ncat <<'END'\n{ON_CPU}END\nexec sleep 60"
    found = run_llmc(tmp_path, copies, "cpu")
    assert found["seconds"]["p50"] == pytest.approx(0.110)  # the first step warms up
    assert found["seconds"]["samples"] == 3
    header = np.fromfile(tmp_path / "gpt2_124M.bin", np.int32, 256)
    assert header[:8].tolist() == [20240326, 3, 64, 300, 2, 2, 16, 320]
    weights = np.fromfile(tmp_path / "gpt2_124M.bin", np.float32, offset=1024)
    model = build_model(TINY_GPT2, select(OpsConfig(), "cpu"))
    assert len(weights) == sum(p.numel() for p in model.parameters())
    tokens = np.fromfile(tmp_path / "tiny_shakespeare_train.bin", np.uint16, offset=1024)
    assert tokens.max() < 300
    assert len(tokens) == np.fromfile(tmp_path / "tiny_shakespeare_train.bin", np.int32)[2]


@pytest.mark.parametrize(
    ("on", "script", "message"),
    [
        ("cuda", "echo no GPU >&2; exit 3", "0 of 4 steps in .* s, last line: no GPU"),
        ("cuda", "true", "0 of 4 steps in .* s, last line: nothing"),
        ("cuda", "exec sleep 5", "0 of 4 steps in 0.1 s, last line: nothing"),
        ("cuda", None, "expected llm.c's train_gpt2cu, found nothing"),
        ("cpu", f"echo '{ON_CPU.split('step 2')[0]}'", "2 of 4 steps in .* s, last line: step 1"),
        ("cpu", None, "expected llm.c's train_gpt2, found nothing"),
    ],
)
def test_llmc_that_fails_is_an_error_in_one_line(tmp_path, monkeypatch, on, script, message):
    if script == "exec sleep 5":
        monkeypatch.setattr(trainers, "PATIENCE_S", 0.1)
    with pytest.raises(UserError, match=message):
        run_llmc(tmp_path, script, on)


# --- parts ----------------------------------------------------------------------------------------


NAMES = """\
GEMM       nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTN
GEMM       sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64
GEMM       void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu>
GEMM       aten::addmm
GEMM       mkldnn::_linear_pointwise
attention  void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>
attention  cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma
attention  _attention_bwd_dkv_kernel
attention  aten::bmm
attention  aten::_softmax
norm       _norm_fwd_kernel
norm       triton_per_fused_add_native_layer_norm_3
norm       void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<>
loss       aten::_log_softmax
loss       _cross_entropy_fwd_bwd_kernel
loss       triton_red_fused__log_softmax_nll_loss_forward_7
optimizer  void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdam>
optimizer  aten::_fused_adamw_
other      triton_poi_fused_gelu_4
other      aten::embedding
"""


@pytest.mark.parametrize("line", NAMES.splitlines())
def test_kernels_are_told_apart_by_name(line):
    part, name = line.split(maxsplit=1)
    assert parts.part_of(name) == part


def test_what_costs_most_over_its_limit_comes_first():
    spent = dict.fromkeys(parts.PARTS, 1.0) | {"GEMM": 10.0, "norm": 6.0, "host gap": 5.0}
    least = dict.fromkeys(parts.PARTS, 0.5) | {"GEMM": 8.0, "host gap": 0.0}
    lines = parts.explain(spent, least)
    assert [line.split(":")[0] for line in lines] == ["norm", "host gap", "GEMM"]
    over = "2.00 ms over the 8.00 ms it cannot go below (80% of its limit)"
    assert lines[2] == f"GEMM: 10.00 ms, {over}"


def test_kernels_of_a_gpu_are_summed_by_part_and_ranges_around_them_are_not():
    def event(name, start, end, device="DeviceType.CUDA"):
        span = SimpleNamespace(start=start, end=end)
        return SimpleNamespace(name=name, device_type=device, time_range=span)

    events = [
        event("nvjet_hsh_128x256", 0, 10),
        event("_attention_fwd_kernel", 8, 12),
        event("fastgpt::steps", 0, 100),
        event("Optimizer.step#AdamW.step", 20, 90),
        event("aten::mm", 0, 5, "DeviceType.CPU"),
    ]
    spent = parts._of_kernels(events)
    assert (spent["GEMM"], spent["attention"], spent["busy"]) == (10, 4, 12)
    assert sum(spent[part] for part in parts.PARTS) == 14
