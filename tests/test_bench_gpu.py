"""`make gpu`: stages under budgets, each recorded whatever becomes of the next."""

import ast
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench import convergence, gpu, records
from bench.gpu import STAGES, Context, Stage
from fastgpt.kernels import aot

ROOT = Path(__file__).parents[1]


def fake(name: str, code: str, budget: int = 20) -> Stage:
    return Stage(name, budget, lambda context, seconds: ["-c", code], gpu._last_line)


@pytest.fixture
def stages(monkeypatch):
    """Replaces the stages, as if on a CUDA machine."""

    def replace(*new: Stage):
        monkeypatch.setattr(gpu, "STAGES", new)
        for name in ("STAGES", "OUT", "FULL"):
            monkeypatch.delenv(name, raising=False)

    return replace


def stage_rows(folder):
    return {row["stage"]: row for row in records.read(folder) if row["kind"] == "stage"}


def test_without_cuda_it_refuses_in_one_line(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu", "--out", str(tmp_path / "out")],
        cwd=ROOT, capture_output=True, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stdout.count("\n") == 1
    assert "no CUDA device" in done.stdout
    assert done.stderr == ""
    assert not (tmp_path / "out").exists()


def test_every_stage_is_recorded_whatever_becomes_of_another(stages, tmp_path, capsys):
    stages(
        fake("env", "print('fine')"),
        fake("aot", "import sys; print('halfway'); sys.exit(3)"),
        fake("parity", "import time; print('so far', flush=True); time.sleep(60)", budget=1),
        fake("bench", "print('still here')"),
    )
    assert gpu.main(["--rehearse", "--out", str(tmp_path)]) == 1
    rows = stage_rows(tmp_path)
    assert [(name, row["passed"]) for name, row in rows.items()] == [
        ("env", True), ("aot", False), ("parity", False), ("bench", True),
    ]  # fmt: skip
    assert rows["aot"]["key"] == "exit status 3; halfway"
    assert rows["parity"]["key"] == "stopped after 1 s; so far"
    assert rows["parity"]["seconds"] < 10
    table = capsys.readouterr().out.split("key figure")[1]
    assert [line.split()[:2] for line in table.splitlines()[1:5]] == [
        ["env", "yes"], ["aot", "NO"], ["parity", "NO"], ["bench", "yes"],
    ]  # fmt: skip
    assert len(list(tmp_path.iterdir())) <= 6
    assert all(path.is_file() for path in tmp_path.iterdir())


def test_a_stage_can_be_repeated_alone(stages, tmp_path):
    stages(fake("env", "print(1)"), fake("step", "print(2)"))
    assert gpu.main(["--rehearse", "--out", str(tmp_path), "--stages", "step"]) == 0
    assert list(stage_rows(tmp_path)) == ["step"]


def test_what_a_stage_started_ends_with_it(stages, tmp_path):
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid, flush=True); time.sleep(60)"
    )
    stages(fake("bench", code, budget=2))
    gpu.main(["--rehearse", "--out", str(tmp_path)])
    pid = int(stage_rows(tmp_path)["bench"]["key"].split("; ")[1])
    status = Path(f"/proc/{pid}/status")

    def alive() -> bool:
        try:
            return "State:\tZ" not in status.read_text()
        except (FileNotFoundError, ProcessLookupError):
            return False

    end = time.monotonic() + 10  # a killed process takes its time, too
    while alive() and time.monotonic() < end:
        time.sleep(0.05)
    assert not alive()


def test_settings_come_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("STAGES", "parity bench")
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setenv("FULL", "1")
    args = gpu.parse([])
    assert (args.stages, args.out, args.full) == (["parity", "bench"], tmp_path, True)
    monkeypatch.setenv("STAGES", "parity benhc")
    with pytest.raises(SystemExit):
        gpu.parse([])


def test_without_the_projects_dependencies_the_stages_still_have_a_place(monkeypatch):
    monkeypatch.delattr("bench.records")
    monkeypatch.setitem(sys.modules, "bench.records", None)  # importing it fails
    assert gpu.default_out().parent == ROOT / "bench" / "results"


def test_budgets_add_up_to_less_than_ten_minutes():
    assert sum(stage.budget for stage in STAGES) < 600


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_full_asks_for_more_than_a_budget_allows(stage, monkeypatch, tmp_path):
    monkeypatch.setattr(Context, "arch", 90)
    short, full = (
        stage.command(Context(tmp_path, full, False), float(stage.budget)) for full in (False, True)
    )
    assert short[0] == full[0] == "-m"
    assert (short == full) == (stage.name == "env")


@pytest.mark.parametrize("full", [False, True])
def test_the_aot_stage_asks_for_what_there_is(full, monkeypatch, tmp_path):
    monkeypatch.setattr(Context, "arch", 90)
    asked = aot.parse(gpu._aot(Context(tmp_path, full, False), 25.0)[2:])
    assert (asked.arch, asked.changed) == ([90], not full)


def test_the_parity_stage_runs_every_test_of_cuda():
    files = gpu.parity_files()
    marked = {
        f"tests/{path.name}"
        for path in (ROOT / "tests").glob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node).endswith(".mark.gpu")
    }
    assert marked == set(files)
    assert files[0] == "tests/test_attention_cuda.py"
    assert all((ROOT / name).exists() for name in files)


def test_figures_are_found_in_what_the_stages_print():
    tests = (
        "a.py::test_x PASSED [1%]\na.py::test_y[1-2] FAILED [2%]\na.py::test_z SKIPPED (no) [3%]"
    )
    assert gpu._tests(tests) == "1 passed, 1 failed, 1 skipped"
    parallel = (
        "a.py::test_x[1]\n[gw0] [  1%] PASSED a.py::test_y\n[gw12] [100%] FAILED a.py::test_x[1]\n"
        "FAILED a.py::test_x[1] - assert 1"
    )
    assert gpu._tests(parallel) == "1 passed, 1 failed, 0 skipped"
    steps = (
        "step/gpt2-124m/B=64 fastgpt: 1,000 tok/s\nstep/gpt2-124m/B=64 fastgpt triton: 2,000 tok/s"
    )
    assert gpu._steps(steps) == "fastgpt triton 2,000 tok/s at gpt2-124m/B=64"
    assert gpu._last_line("a\nb\n\n") == "b"
    rows = (
        "│ attention/gpt2-124m/bf16 │ fwd  │ ours  │ 0.1 0.1 0.1 │ 2.15e+02 TFLOP/s │ 27% │\n"
        "│ attention/gpt2-124m/bf16 │ fwd  │ eager │ 0.2 0.2 0.2 │ 107 TFLOP/s │ 14% │\n"
        "│ rms_norm/n768/bf16       │ fwd  │ ours  │ 0.1 0.1 0.1 │ 3e+03 GB/s │ 70% │\n"
    )
    assert gpu._measured(rows) == "2 rows of ours; attention/gpt2-124m/bf16 fwd 2.15e+02 TFLOP/s"


def test_losses_that_drift_apart_do_not_pass():
    flat = [5.0 - 0.01 * step for step in range(60)]
    apart = [loss * 1.001 for loss in flat]
    assert convergence.compare({"torch": flat, "triton": flat}, "fp32")["passed"]
    found = convergence.compare({"torch": flat, "triton": apart}, "fp32")
    assert not found["passed"]
    assert found["relative_difference"] == pytest.approx(1e-3)
    risen = flat[::-1]
    assert not convergence.compare({"torch": risen, "triton": risen}, "fp32")["passed"]


@pytest.mark.slow
def test_every_stage_runs_on_a_cpu(tmp_path):
    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu", "--rehearse", "--out", str(out)],
        cwd=ROOT, capture_output=True, text=True, env={**os.environ, "FASTGPT_COMMIT": "abc"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + (out / "gpu.log").read_text()
    rows = records.read(out)
    stages = [row for row in rows if row["kind"] == "stage"]
    assert [row["stage"] for row in stages] == [stage.name for stage in STAGES]
    assert all(row["passed"] for row in stages)
    kinds = {row["kind"] for row in rows}
    assert {"environment", "machine", "op", "missing", "step", "convergence", "stage"} <= kinds
    triton = next(r for r in rows if r["kind"] == "step" and r["implementation"] != "eager")
    assert triton["ops"]["attention"] == triton["ops"]["norm"] == "triton"
    (drift,) = (row for row in rows if row["kind"] == "convergence")
    assert drift["ops"]["triton"]["attention"] == "triton"
    assert drift["relative_difference"] < 1e-5
    assert json.loads((out / "aot.json").read_text())["rows"]
    assert len(list(out.iterdir())) <= 6
