"""`make gpu`: groups of stages with time budgets, whose output and records outlive any of them."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time

import pytest

from bench import __main__ as bench
from bench import convergence, gpu, records, reproduce, step
from bench.gpu import PLANS, STAGES, Stage
from bench.tune import __main__ as tune
from fastgpt import flags
from fastgpt.cli import configure
from tests.processes import ROOT, python


def shell(code: str, **options) -> Stage:
    return Stage(options.pop("seconds", 20), f"-c {shlex.quote(code)}", **options)


@pytest.fixture
def plan(monkeypatch, tmp_path, capsys):
    """Runs groups of stages in place of the real ones; returns status, output and log."""

    def run(seconds: float, stages: dict[str, Stage], *groups: list[str]):
        monkeypatch.setattr(gpu, "STAGES", stages)
        monkeypatch.setattr(gpu, "PLANS", {"first": (seconds, groups)})
        monkeypatch.setattr(gpu, "CARRIED", tmp_path / "nothing")
        monkeypatch.setattr(gpu, "SCRATCH", tmp_path / "scratch")
        monkeypatch.setattr(gpu, "BEGAN", time.monotonic())
        status = gpu.main(["--out", str(tmp_path / "out")])
        printed = capsys.readouterr().out
        said = {line.split()[0]: line.split()[1] for line in printed.splitlines()}
        return status, said, printed, (tmp_path / "out/log.txt").read_text()

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_a_stage_that_fails_hangs_or_is_deaf_takes_no_other_with_it(plan):
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True)"
    stages = {
        "env": shell("print('fine')"),
        "fails": shell("import sys; print('halfway'); sys.exit(3)"),
        "hangs": shell(f"{deaf}; time.sleep(60)", seconds=2),
        "beside": shell("import time; time.sleep(1); print('beside')"),
        "behind": shell("print('behind')"),
    }
    status, said, printed, log = plan(60, stages, ["env"], ["fails", "hangs", "beside"], ["behind"])
    assert status == 1
    passed = {"env": "yes", "fails": "NO", "hangs": "NO", "beside": "yes", "behind": "yes"}
    assert passed.items() <= said.items()
    assert "exit status 3; halfway" in printed
    assert "stopped; deaf" in printed
    assert {"hangs| deaf", "beside| beside", "behind| behind"} <= set(log.splitlines())


def test_a_plan_ends_in_time_and_a_stage_leaves_some_to_those_behind_it(plan):
    sleep = "import time; time.sleep(60)"
    stages = {"env": shell(sleep, leaves=5), "next": shell(sleep), "last": shell(sleep)}
    status, said, printed, _ = plan(13.5, stages, ["env"], ["next"], ["last"])
    assert status == 1
    assert said["env"] == said["next"] == "NO"
    took = {line.split()[0]: float(line.split()[2]) for line in printed.splitlines()[:2]}
    assert took["env"] < 6
    assert sum(took.values()) < 12
    assert "last               NO  not begun: no time is left" in printed


def test_without_cuda_nothing_else_is_begun(plan):
    stages = {"env": shell("import sys; sys.exit(2)"), "next": shell("print('next')")}
    status, said, *_ = plan(60, stages, ["env"], ["next"])
    assert (status, said["env"], "next" in said) == (2, "NO", False)


@pytest.mark.parametrize(("step", "begun"), [("print(1)", False), ("1 / 0", True)])
def test_the_eager_step_is_taken_only_if_there_is_no_other(plan, step, begun):
    stages = {"env": shell("1"), "step": shell(step), "step-eager": shell("print('eager')")}
    assert ("step-eager" in plan(60, stages, ["env"], ["step"], ["step-eager"])[1]) == begun


def test_log_and_records_outlive_a_kill(tmp_path):
    row = json.dumps({"kind": "test", "run": "3000", "test": "a::b", "outcome": "failed"})
    script, records = tmp_path / "stage.py", tmp_path / "a.jsonl"
    lines = f"open({str(records)!r}, 'w').write({row!r})", "print('said', flush=True)"
    script.write_text("\n".join([*lines, "import time; time.sleep(20)"]))
    program = f"""from bench import gpu
gpu.STAGES = {{"env": gpu.Stage(60, {str(script)!r})}}
gpu.main(["env", "--out", {str(tmp_path)!r}])"""
    runner = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, start_new_session=True)
    log, end = tmp_path / "log.txt", time.monotonic() + 60
    while not (log.exists() and "env| said" in log.read_text()) and time.monotonic() < end:
        time.sleep(0.1)
    os.killpg(runner.pid, signal.SIGSTOP)  # nothing is tidied up
    runner.kill()
    runner.wait()
    assert "env| said" in log.read_text()
    assert records.read_text() == row
    assert list(gpu.digest(tmp_path)) == ["tests: {'failed': 1}", "FAILED a::b"]


def cases_of(words: list[str]) -> bool:
    asked = flags.command(bench.Bench, words, prog="")
    found = [case.name for case in bench.chosen(asked, "cuda")]
    return asked.sizes == "tiny" or sorted(found) == sorted(asked.only)


PARSERS = {
    "bench": cases_of,
    "bench.step": lambda words: flags.command(step.StepBench, words, prog=""),
    "bench.reproduce": lambda words: reproduce.chosen(
        flags.command(reproduce.Reproduce, words, prog="").only
    ),
    "bench.convergence": lambda words: flags.command(convergence.Convergence, words, prog=""),
    "bench.tune": lambda words: tune.selected([90], tune.parse_args(words).only),
    "_env": lambda words: words[0],
    "_tests": lambda words: all((ROOT / word).exists() for word in words if "tests/" in word),
    "_train": lambda words: configure(words[1:]),
    "_resume": lambda words: configure(words[1:]),
}


@pytest.mark.parametrize("kind", ["command", "tiny", "warm"])
@pytest.mark.parametrize("name", STAGES)
def test_the_commands_of_all_stages_are_understood(name, kind, tmp_path, shakespeare, monkeypatch):
    """So are the cases, files and slots that they name."""
    monkeypatch.setenv("FASTGPT_DATA", str(shakespeare.parent))
    stage = STAGES[name]
    more = "" if kind == "command" else getattr(stage, kind)
    command = more if more.startswith("-m") else stage.command + more
    given = {"out": tmp_path, "scratch": tmp_path, "nanogpt": "--nanogpt=x", "peer": "nanogpt"}
    _, module, *words = [word.format(**given) for word in shlex.split(command)]
    if module == "bench.gpu":
        module, *words = words
    assert PARSERS[module](words)


def test_every_stage_has_its_place_in_a_plan():
    planned = {name for _, groups in PLANS.values() for group in groups for name in group}
    assert {name.lstrip("~") for name in planned} == set(STAGES)


def test_an_unknown_stage_is_named(capsys):
    with pytest.raises(SystemExit):
        gpu.main(["first", "stpe"])
    assert "'stpe'" in capsys.readouterr().err


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
    given = ("-n", "1", "-c", "/dev/null", "--rootdir", tmp_path, tmp_path / "test_some.py")
    done = python("-m", "bench.gpu", "_tests", tmp_path, *given)
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
