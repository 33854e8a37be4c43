"""`make gpu`: groups of stages with time budgets, whose output and records outlive any of them."""

import re
import shlex
import time
from functools import partial

import pytest

from bench import __main__ as bench
from bench import gpu, ops, reproduce, step, tune
from bench.gpu import PLANS, STAGES, Stage
from fastgpt import flags
from fastgpt.cli import configure
from tests.processes import ROOT

SLEEP = "import time; time.sleep(20)"
DEAF = f"import signal; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); {SLEEP}"


@pytest.fixture
def plan(monkeypatch, tmp_path, capsys):
    """Runs groups of stages, whose code is given, in place of the real ones."""

    def run(seconds: float, stages: dict[str, Stage], *groups: list[str]) -> tuple[int, str]:
        made = {x: s._replace(command=f"-c {shlex.quote(s.command)}") for x, s in stages.items()}
        monkeypatch.setattr(gpu, "STAGES", made)
        monkeypatch.setattr(gpu, "PLANS", {"first": (seconds, groups)})
        monkeypatch.setattr(gpu, "CARRIED", tmp_path / "nothing")
        monkeypatch.setattr(gpu, "BEGAN", time.monotonic())
        monkeypatch.setattr("signal.signal", lambda *_: None)
        return gpu.main(["--out", str(tmp_path)]), capsys.readouterr().out

    return run


def test_a_stage_that_fails_hangs_or_is_deaf_takes_no_other_with_it(plan):
    stages = {name: Stage(20, "print(1)") for name in ("env", "beside", "behind")}
    stages |= {"fails": Stage(20, "print('halfway'); exit(3)"), "hangs": Stage(2, DEAF)}
    status, printed = plan(60, stages, ["env"], ["fails", "hangs", "beside"], ["behind"])
    ended = {"fails": "NO  exit status 3; halfway", "hangs": "NO  stopped; deaf"}
    found = re.findall(r"^(\w+) +(\w+(?: .*;)?) +\d+ s ( .*)", printed, re.M)
    found = {name: how + last for name, how, last in found}
    assert (status, found) == (1, dict.fromkeys(stages, "yes 1") | ended)


@pytest.mark.slow
def test_a_plan_ends_in_time_and_a_stage_leaves_some_to_those_behind_it(plan):
    stages = {"env": Stage(20, SLEEP, leaves=5), "next": Stage(20, SLEEP), "last": Stage(20, SLEEP)}
    status, printed = plan(13.5, stages, ["env"], ["next"], ["last"])
    took = [int(seconds) for seconds in re.findall(r"NO  stopped; (\d+) s", printed)]
    assert (status, took[0] < 6, took[1] > 0, sum(took) < 12, took[2]) == (1, True, True, True, 0)


def test_what_follows_depends_on_cuda_and_on_the_step(plan):
    for env, step_, begun in (("exit(2)", "1", 1), ("1", "1", 2), ("1", "x", 3)):
        stages = {"env": Stage(20, env), "step": Stage(20, step_), "step-eager": Stage(20, "1")}
        _, printed = plan(60, stages, ["env"], ["step"], ["step-eager"])
        assert [name for name in stages if name in printed.split()] == [*stages][:begun]


parse = partial(flags.command, prog="")
PARSERS = {
    "bench": lambda words: ops.cases("cuda", (x := parse(bench.Bench, words)).op, x.size),
    "bench.step": lambda words: parse(step.StepBench, words),
    "bench.reproduce": lambda words: parse(reproduce.Reproduce, words).only,
    "bench.tune": lambda words: tune.selected([90], parse(tune.Tune, words).only),
    "_tests": lambda words: all((ROOT / word).exists() for word in words if "tests/" in word),
}


@pytest.mark.parametrize("name", STAGES)
def test_commands_cases_and_files_of_a_stage_are_there(name, tmp_path, shakespeare, monkeypatch):
    monkeypatch.setenv("FASTGPT_DATA", str(shakespeare.parent))
    for more in ("", STAGES[name].tiny, STAGES[name].warm):
        command = (STAGES[name].command + more).format(out=tmp_path, peers="nanogpt --nanogpt=x")
        _, module, *words = shlex.split(command.replace("-m bench.gpu", "-m"))
        assert PARSERS.get(module, lambda words: configure(words[1:]))(words)
    assert any(name in group for _, groups in PLANS.values() for group in groups)
