"""Settings that depend on the machine: number format, compiler, and its matmul rate."""

import json
import subprocess
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from fastgpt.device import device
from fastgpt.logs.metrics import read_records
from tests.runs import series


@pytest.mark.parametrize(
    ("feature", "most", "fast"),
    [
        ("avx512_bf16", None, True),
        ("avx512_f", None, False),
        ("avx512_bf16", "AVX512_CORE", False),
        ("avx512_bf16", "avx512_core_bf16", True),
    ],
)
def test_bf16_is_as_fast_as_the_instructions_that_onednn_may_use(monkeypatch, feature, most, fast):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {feature: True}, raising=False)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    if most is not None:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", most)
    assert device.fast_bf16("cpu") is fast


def test_compile_workers_are_killed_at_the_end_of_the_process(monkeypatch):
    process, registered = subprocess.Popen(["sleep", "600"]), []
    pools = [SimpleNamespace(process=process), SimpleNamespace()]
    monkeypatch.setattr("torch._inductor.async_compile._pool_set", pools)
    monkeypatch.setattr("atexit.register", registered.append)
    device.end_compile_workers_at_exit.__wrapped__()
    registered[-1]()
    assert process.wait(20) == -9


@pytest.mark.parametrize(
    ("asked", "kind", "fast", "expected"),
    [
        ("auto", "cpu", True, "bf16"),
        ("auto", "cuda", False, "fp32"),
        ("bf16", "cpu", False, "bf16"),
        ("fp16", "cuda", True, "fp16"),
    ],
)
def test_precision(monkeypatch, asked, kind, fast, expected):
    monkeypatch.setattr(device, "fast_bf16", lambda _: fast)
    assert device.pick_precision(asked, kind) == expected


@pytest.mark.parametrize("found", [True, False])
@pytest.mark.parametrize(
    ("asked", "kind", "expected"),
    [("auto", "cpu", False), ("auto", "cuda", True), ("on", "cpu", True), ("off", "cuda", False)],
)
def test_compile(monkeypatch, asked, kind, expected, found):
    monkeypatch.setattr(device, "has_compiler", lambda: found)
    compiled, line = device.pick_compile(asked, kind)
    assert compiled is (expected and found)
    assert ("no C++ compiler" in line) is (expected and not found)


@pytest.mark.parametrize("name", ["g++", "clang++", "own"])
def test_compilers_that_are_found(monkeypatch, tmp_path, name):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert not device.has_compiler()
    (tmp_path / name).touch(mode=0o755)
    if name == "own":
        monkeypatch.setenv("CXX", str(tmp_path / name))
    assert device.has_compiler()


def test_a_peak_that_a_run_surpasses_is_what_the_run_reaches(fit, monkeypatch):
    monkeypatch.setattr(device, "measured_peak", lambda *_: 1e6)
    records = read_records(fit("--steps 2") / "metrics.jsonl")
    assert all(0 < r["mfu"] <= 1 for r in records if "mfu" in r)


def test_the_peak_is_that_of_the_fastest_product_after_the_first(monkeypatch):
    """By the clock of this test products last 0.01, 0.4, 0.2 and 0.3 s."""
    clock, left = mock.Mock(now=0.0), [0.01, 0.4, 0.2, 0.3]
    clock.perf_counter = lambda: clock.now

    def product(*_):
        clock.now += left.pop(0)

    reset = mock.Mock()
    monkeypatch.setattr(device, "time", clock)
    monkeypatch.setattr(device, "reset_peak_memory", reset)
    monkeypatch.setattr("fastgpt.kernels.linear", product)
    peak = device.measured_peak("cpu", torch.float32, 0.85)
    assert peak == pytest.approx(2 * 1024**3 / 0.2)
    reset.assert_called_once_with("cpu")  # what the matrices take is not the run's peak memory


@pytest.mark.slow
@pytest.mark.skipif(not device.has_compiler(), reason="no C++ compiler")
def test_compiled_training_gives_the_losses_of_eager(fit, tmp_path):
    flags = "--train.device cpu --optim.kind adamw --run-dir"
    eager = fit(flags, str(tmp_path / "eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=False):
        compiled = fit(f"--train.compile on {flags}", str(tmp_path / "compiled"))
    counters = torch._dynamo.utils.counters
    assert not counters["graph_break"], counters["graph_break"]
    # training, evaluation, and the sampling that is not compiled
    assert counters["stats"]["unique_graphs"] == 2, counters["stats"]
    assert json.loads((compiled / "manifest.json").read_text())["compile"] is True
    for key in ("train_loss", "val_loss"):
        assert series(compiled, key) == pytest.approx(series(eager, key), rel=1e-4)
