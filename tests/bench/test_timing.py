"""The timer, tested with a fake clock."""

import pytest
import torch

from bench import timing
from bench.timing import Timed, Timer, machine_rates, peaks_of, quantiles, time_process
from fastgpt.errors import UserError


class Clock:
    """A fake clock that only moves when something is done with it."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(timing, "time", found)
    return found


def test_preparing_is_not_timed(clock):
    prepared, got = [], []

    def prepare():
        clock.passes(5.0)
        prepared.append(len(prepared))
        return prepared[-1]

    def call(state):
        clock.passes(1.0)
        got.append(state)

    assert Timer("cpu").sample(Timed(call, prepare), calls=3)[0] == 1.0
    assert got == prepared == [0, 1, 2]


def test_short_calls_are_timed_several_at_a_time(clock):
    timer = Timer("cpu")
    assert timer._plan(Timed(lambda _: clock.passes(1e-4))) == (10, 0.0)
    assert timer._plan(Timed(lambda _: clock.passes(1.0))) == (1, 0.0)


def test_rivals_take_turns_in_an_order_that_alternates():
    order = []
    rivals = {name: Timed(lambda _, name=name: order.append(name)) for name in "AB"}
    timer = Timer("cpu")
    timer._plan = lambda timed: (1, 0.0)
    samples = timer.interleave(rivals, seconds=0, rounds=4)
    assert "".join(order) == "ABBAABBA"
    assert {name: len(s.device) for name, s in samples.items()} == {"A": 4, "B": 4}


@pytest.mark.parametrize(("seconds", "rounds"), [(0.0, 3), (7.5, 5), (1e9, 100)])
def test_time_is_kept_to_but_for_three_rounds(clock, seconds, rounds):
    rivals = {"slow": Timed(lambda _: clock.passes(1.5))}
    samples = Timer("cpu").interleave(rivals, seconds=seconds)["slow"]
    assert len(samples.device) == len(samples.host) == rounds
    assert samples.device == pytest.approx([1.5] * len(samples.device))


def test_quantiles():
    found = quantiles([5.0, 1.0, 2.0, 3.0, 4.0, 6.0])
    assert found == {"p20": 2.0, "p50": 3.5, "p80": 5.0, "samples": 6}


def test_a_copy_counts_what_it_reads_and_what_it_writes(clock, monkeypatch):
    monkeypatch.setitem(timing.COPY_BYTES, "cpu", 2**20)
    monkeypatch.setattr(timing, "measured_peak", lambda on, dtype, seconds: 7e9)
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, source: clock.passes(0.5))
    rates = machine_rates(Timer("cpu"), ("fp32", "bf16"), seconds=0.0)
    assert rates == {"matmul fp32": 7e9, "matmul bf16": 7e9, "copy": 2 * 2**20 / 0.5}
    assert peaks_of(rates, "bf16") == {"matmul": 7e9, "copy": rates["copy"]}


def test_a_process_that_fails_is_an_error_in_one_line(tmp_path):
    with pytest.raises(UserError, match=r"^the peer failed: no such thing$"):
        time_process("the peer", "-c", "import sys; print(1); sys.exit('no such thing')")
    seconds, said = time_process("the peer", "-c", "import os; print(os.getcwd())", cwd=tmp_path)
    assert said.strip() == str(tmp_path)
    assert seconds > 0
