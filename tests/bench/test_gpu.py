"""`make gpu`: stages with time budgets, each recorded whatever becomes of the next."""

import ast
import json
import os
import select
import subprocess
from pathlib import Path

import pytest

from bench import convergence, gpu, records
from bench.gpu import STAGES, Context, Stage
from fastgpt.kernels import aot
from tests.processes import ROOT, python


def fake(name: str, code: str, budget: int = 20) -> Stage:
    return Stage(name, lambda _: budget, lambda context, seconds: ["-c", code])


@pytest.fixture
def rehearse(monkeypatch, tmp_path):
    """Runs these stages instead of the real ones; returns the exit status and rows by name."""

    def run(*stages: Stage, flags: tuple[str, ...] = ()):
        monkeypatch.setattr(gpu, "STAGES", stages)
        for name in ("STAGES", "OUT", "FULL"):
            monkeypatch.delenv(name, raising=False)
        status = gpu.main(["--rehearse", "--out", str(tmp_path), *flags])
        rows = [row for row in records.read(tmp_path) if row["kind"] == "stage"]
        return status, {row["stage"]: row for row in rows}

    return run


def command(*flags: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "bench.gpu", *flags, **env)


def test_without_cuda_it_refuses_in_one_line(tmp_path):
    done = command("--out", tmp_path / "out", CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stderr) == (2, "")
    assert done.stdout.count("\n") == 1
    assert "no CUDA device" in done.stdout
    assert not (tmp_path / "out").exists()


def test_every_stage_is_recorded_whatever_becomes_of_another(rehearse, tmp_path, capsys):
    stages = (
        fake("env", "print('fine')"),
        fake("aot", "import sys; print('halfway'); sys.exit(3)"),
        fake("parity", "import time; print('so far', flush=True); time.sleep(60)", budget=1),
        fake("bench", "print('still here')"),
    )
    assert rehearse(*stages, flags=("--stages", "bench"))[0] == 0  # one alone
    status, rows = rehearse(*stages)
    assert status == 1
    passed = {name: row["passed"] for name, row in rows.items()}
    assert passed == {"env": True, "aot": False, "parity": False, "bench": True}
    assert rows["aot"]["key"] == "exit status 3; halfway"
    assert rows["parity"]["key"] == "stopped after 1 s; so far"
    assert rows["parity"]["seconds"] < 10
    table = capsys.readouterr().out.split("key figure")[2]
    said = [line.split()[:2] for line in table.splitlines()[1:5]]
    assert said == [["env", "yes"], ["aot", "NO"], ["parity", "NO"], ["bench", "yes"]]
    assert len(list(tmp_path.iterdir())) <= 6
    assert all(path.is_file() for path in tmp_path.iterdir())


def test_what_a_stage_started_ends_with_it(rehearse, tmp_path):
    pipe = tmp_path / "pipe"  # it ends when nobody is left who could write
    os.mkfifo(pipe)
    with open(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as reader:
        script = f"(echo started; sleep 60) >'{pipe}'"
        rehearse(fake("bench", f"import os; os.system({script!r})", budget=2))
        assert reader.read() == b"started\n"
        assert select.select([reader], [], [], 10)[0]
        assert reader.read() == b""


def test_settings_come_from_the_environment(monkeypatch, tmp_path):
    for name, value in {"STAGES": "parity bench", "OUT": str(tmp_path), "FULL": "1"}.items():
        monkeypatch.setenv(name, value)
    args = gpu.parse([])
    assert (args.stages, args.out, args.full) == (["parity", "bench"], tmp_path, True)
    monkeypatch.setenv("STAGES", "parity benhc")
    with pytest.raises(SystemExit):
        gpu.parse([])


@pytest.mark.parametrize(("cores", "aot_s", "parity_s"), [(16, 18, 383), (2, 38, 1440)])
def test_budgets_follow_from_kernels_and_tests(monkeypatch, tmp_path, cores, aot_s, parity_s):
    """One form of each of 15 kernels is compiled, and tests are collected, here 470 of them."""
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(gpu, "tests_to_run", lambda _: 470)
    context = Context(tmp_path, full=False, rehearse=False)
    budgets = {stage.name: stage.budget(context) for stage in STAGES}
    assert (budgets["aot"], budgets["parity"]) == (aot_s, parity_s)
    halves = list(budgets.values())[:3], list(budgets.values())[3:]
    assert cores < 16 or all(sum(half) < 9 * 60 for half in halves)


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_full_asks_for_more_than_a_budget_allows(stage, monkeypatch, tmp_path):
    monkeypatch.setattr(Context, "arch", 103)
    short, full = (stage.command(Context(tmp_path, full, False), 60.0) for full in (False, True))
    assert short[0] == full[0] == "-m"
    assert (short == full) == (stage.name == "env")
    if stage.name == "aot":
        asked = [aot.parse(command[2:]) for command in (short, full)]
        assert [(x.arch, x.changed) for x in asked] == [([100], True), ([100], False)]


def test_the_parity_stage_runs_every_test_of_cuda(tmp_path):
    assert gpu.tests_to_run(Context(tmp_path, full=False, rehearse=True)) > 2
    files = gpu.parity_files()
    marked = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node).endswith(".mark.gpu")
    }
    assert marked == set(files)
    assert files[0] == "tests/train/test_cuda.py"


def test_a_figure_is_of_what_its_stage_has_recorded_and_not_run(rehearse, tmp_path, monkeypatch):
    found = [{"kind": "test", "outcome": word} for word in ("passed", "passed", "skipped")]
    reasons = ("over the budget of 1 s", "needs CUDA")
    found += [{"kind": "missing", "reason": reason} for reason in reasons]
    lines = "".join(json.dumps({**row, "run": "3000-01-01T00:00:00-1"}) + "\n" for row in found)
    writing = (
        "import time; from pathlib import Path\n"
        f"Path({str(tmp_path)!r}, 'a.jsonl').write_text({lines!r})\n"
        "print('not this', flush=True); time.sleep(60)"
    )
    earlier = {"kind": "test", "run": "2000-01-01T00:00:00-1", "outcome": "failed"}
    (tmp_path / "2000-01-01-abc.jsonl").write_text(json.dumps(earlier) + "\n")
    monkeypatch.setattr(gpu, "tests_to_run", lambda _: 5)
    _, rows = rehearse(Stage("parity", lambda _: 2, lambda *_: ["-c", writing], "test", gpu._tests))
    assert rows["parity"]["key"] == (
        "stopped after 2 s; 2 passed, 0 failed, 1 skipped; 2 of 5 tests not run; "
        "1 of the cases not run: over the budget"
    )


def test_figures_of_the_bench_and_of_the_step():
    def op(name, who, which, tflops):
        case = f"{name}/gpt2-124m/bf16"
        return {"op": name, "case": case, "implementation": who, "pass": which, "tflops": tflops}

    rows = [
        op("rms_norm", "ours", "fwd", 1.0),
        op("attention", "eager", "fwd", 107.0),
        op("attention", "ours", "fwd", 215.4),
        op("attention", "ours", "bwd", 300.0),
    ]
    assert gpu._measured(rows) == "3 of our rows; attention/gpt2-124m/bf16 fwd 215 TFLOP/s"
    rates = {"fastgpt": 1000.0, "fastgpt triton": 2000.0, "nanogpt": 3000.0}
    steps = [
        {"case": "step/gpt2-124m/B=64", "implementation": who, "tok_per_s": rate}
        for who, rate in rates.items()
    ]
    assert gpu._steps(steps) == "fastgpt triton 2,000 tok/s at gpt2-124m/B=64"
    assert gpu._steps(steps[2:]) == "no step of fastgpt"


def test_the_outcome_of_each_test_is_recorded_once(tmp_path):
    source = """
import pytest
@pytest.fixture
def broken(): raise OSError
def test_right(): pass
def test_wrong(): assert False
def test_unset(broken): pass
@pytest.mark.skip
def test_absent(): pass
"""
    (tmp_path / "test_some.py").write_text(source)
    arguments = ("--pytest", "-n", "1", "-c", "/dev/null", "--rootdir", tmp_path)
    done = command("--rehearse", "--out", tmp_path, *arguments, tmp_path / "test_some.py")
    assert done.returncode == 1, done.stderr
    rows = [row for row in records.read(tmp_path) if row["kind"] == "test"]
    outcomes = sorted((row["test"].split("::test_")[1], row["outcome"]) for row in rows)
    assert outcomes == [
        ("absent", "skipped"), ("right", "passed"), ("unset", "failed"), ("wrong", "failed"),
    ]  # fmt: skip


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
    done = command("--rehearse", "--out", out, FASTGPT_COMMIT="abc")
    assert done.returncode == 0, done.stdout + (out / "gpu.log").read_text()
    rows = records.read(out)
    stages = [row for row in rows if row["kind"] == "stage"]
    assert [row["stage"] for row in stages] == [stage.name for stage in STAGES]
    kinds = {row["kind"] for row in rows}
    assert {"environment", "machine", "op", "missing", "step", "convergence", "stage"} <= kinds
    triton = next(r for r in rows if r["kind"] == "step" and r["implementation"] != "eager")
    assert triton["ops"]["attention"] == triton["ops"]["norm"] == "triton"
    (drift,) = (row for row in rows if row["kind"] == "convergence")
    assert drift["ops"]["triton"]["attention"] == "triton"
    assert drift["relative_difference"] < 1e-5
    assert json.loads((out / "aot.json").read_text())["rows"]
    assert len(list(out.iterdir())) <= 6
