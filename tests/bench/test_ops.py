"""The ops' benchmark: timer, parity, command, records and page."""

import json
import re
from dataclasses import replace
from functools import partial
from itertools import chain
from unittest import mock

import pytest
import torch

from bench import __main__ as command
from bench import measure, records, report
from bench.measure import Checker, Timed, Timer, op_records, quantiles, timed_pass
from bench.ops import Case, cases
from bench.records import record
from fastgpt.errors import UserError
from fastgpt.kernels.specs import SPECS
from tests.parity import backward_only

RATES = {"matmul fp32": 1e12, "copy": 1e10}
EAGER = SPECS["attention"].eager
TINY = ("--device", "cpu", "--size", "tiny", "--rounds", "2", "--out")


@pytest.fixture
def passes(monkeypatch):
    """Moves a clock, which stands still otherwise."""
    spent: list[float] = []
    monkeypatch.setattr(measure, "time", mock.Mock(perf_counter=lambda: sum(spent)))
    return spent.append


def test_preparing_is_not_timed_and_short_calls_are_timed_several_at_a_time(passes):
    states = iter(range(3))
    call = mock.Mock(side_effect=lambda _: passes(1.0))
    assert Timer("cpu").sample(Timed(call, lambda: passes(5.0) or next(states)), calls=3) == 1.0
    assert call.call_args_list == [mock.call(0), mock.call(1), mock.call(2)]
    for seconds, calls in ((1e-4, 10), (1.0, 1)):
        timed = Timed(lambda _, seconds=seconds: passes(seconds))
        assert Timer("cpu")._plan(timed) == (calls, 0.0)


@pytest.mark.parametrize(("seconds", "rounds"), [(0.0, 3), (15.0, 5), (1e9, 100)])
def test_rivals_alternate_and_keep_to_the_time_but_for_three_rounds(passes, seconds, rounds):
    order = []
    rivals = {x: Timed(lambda _, x=x: passes(1.5) or order.append(x)) for x in "AB"}
    found = Timer("cpu").interleave(rivals, seconds=seconds)
    assert found["A"] == found["B"] == pytest.approx([1.5] * rounds)
    assert "".join(order[-2 * rounds :]).startswith("ABBAAB")


def test_quantiles_and_limits_by_hand(passes, monkeypatch):
    figure = {"p20": 2.0, "p50": 3.5, "p80": 5.0, "samples": 6}
    assert quantiles([5.0, 1.0, 2.0, 3.0, 4.0, 6.0]) == figure
    monkeypatch.setitem(measure.COPY_BYTES, "cpu", 2**20)
    monkeypatch.setattr(measure, "measured_peak", lambda on, dtype, seconds: 7e9)
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, source: passes(0.5))
    rates = measure.machine_rates(Timer("cpu"), ("fp32",), seconds=0.0)
    assert rates == {"matmul fp32": 7e9, "copy": 2 * 2**20 / 0.5}  # read and written
    assert measure.limit(1000, 10, {"matmul": 100.0, "copy": 10.0}) == (10.0, "matmul")
    assert measure.limit(1000, 200, {"matmul": 100.0, "copy": 10.0}) == (20.0, "copy")


def attention(**others) -> Case:
    """Returns the tiny case of attention: eager, flex and `others`; ours is eager by default."""
    (case,) = cases("cpu", ("attention",), ("tiny",))
    others = {"ours": EAGER, **others}  # in Triton's interpreter ours would only take time
    made = {name: lambda on, call=call: call for name, call in others.items()}
    return replace(case, peers={**case.peers, **made}, against=("eager", "flex", *made))


def rows_of(case: Case) -> tuple[dict[str, list[dict]], set[str]]:
    """Measures a case; returns the records by implementation, and the names of the timed ones."""
    found = op_records(case, Timer("cpu"), RATES, seconds=0, rounds=2)
    rows = records.grouped(chain(*found), "implementation")
    return rows, {name for name in rows if [bool(x["figure"]) for x in rows[name]] == [True] * 3}


def times(factor):
    return lambda *qkv: factor * EAGER(*qkv)


@pytest.mark.parametrize(("wrong", "why"), [
    (times(1.01), "wrong: output 0"),
    (lambda q, k, v: EAGER(q, backward_only(k, 1.01), v), "wrong: gradient of k"),
    (times(float("nan")), "wrong: output 0"),
    (lambda *qkv: EAGER(*qkv)[..., :-1], "RuntimeError: Mismatch in shape"),
    (mock.Mock(side_effect=RuntimeError("no kernel\nat all")), "RuntimeError: no kernel"),
])  # fmt: skip
def test_a_kernel_made_wrong_gets_no_time(wrong, why):
    rows, timed = rows_of(attention(ours=wrong))
    assert (len(rows["ours"]), timed) == (1, {"eager"})  # the others are timed nevertheless
    assert why in rows["ours"][0]["why"]


def test_a_peer_that_is_beyond_the_rule_or_broken_costs_nobody_else_a_time():
    broken = mock.Mock(side_effect=AttributeError("no attend"))
    case = attention(slightly=times(1.01), badly=times(1.1), broken=broken)
    rows, timed = rows_of(case)
    assert timed == {"ours", "eager", "slightly"}
    assert rows.keys() == timed | {"badly", "broken", "flex"}
    assert [rows[name][0]["inexact"] for name in ("slightly", "eager")] == [True, False]
    assert rows["slightly"][0]["error"] == pytest.approx(0.01, rel=0.1)
    assert rows["broken"][0]["why"] == "AttributeError: no attend"
    for row, (flops, size) in zip(rows["eager"], case.work().values(), strict=True):
        found = [row[name] * row["figure"]["p50"] for name in ("tflops", "gb_per_s", "share")]
        assert found == pytest.approx([flops / 1e12, size / 1e9, max(flops / 1e12, size / 1e10)])


@pytest.mark.parametrize("case", cases("cpu", size=("tiny",)), ids=lambda case: case.name)
def test_ours_of_every_op_are_right(case):
    assert Checker(case, "cpu").complaints(case.implementations()["ours"]("cpu"))[0] == []


@pytest.mark.parametrize("which", ["fwd", "bwd", "both"])
def test_what_is_written_over_is_restored_and_the_gradient_above_a_loss_is_1(which):
    (case,) = cases("cpu", ("cross_entropy",), ("tiny",))
    inputs, same = case.inputs("cpu"), case.inputs("cpu")["logits"]  # random, and equal for all
    for name in ("ours", "eager"):
        call = case.implementations()[name]("cpu")
        run = timed_pass(case, call, which, inputs)
        states = [run.prepare() for _ in range(2)]  # as where several calls make one sample
        (one,), (two,) = (run.call(state)[-1:] for state in states)
        torch.testing.assert_close(one, two, rtol=0, atol=0)
        assert torch.equal(inputs["logits"], same)
    if which != "fwd":  # of eager
        truth = torch.autograd.grad(call(*inputs.values()), inputs["logits"])[0]
        torch.testing.assert_close(one, truth)


def test_a_run_is_recorded_printed_and_compared(tmp_path, monkeypatch, capsys):
    assert command.main(["layer_norm", *TINY, str(tmp_path), "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    kept = records.read(tmp_path)
    assert all(row.items() <= line.items() for row, line in zip(rows, kept, strict=True))
    cases = [row["case"] for row in rows if row["implementation"] == "ours"]
    assert cases == [f"layer_norm/tiny/fp32/{which}" for which in ("fwd", "bwd", "both")]
    for row in kept:  # as if ours had been faster, on the same machine
        if row["implementation"] == "ours" and row["case"].endswith("bwd"):
            row["figure"]["p50"] /= 100
    monkeypatch.setattr(records, "read", lambda: kept)
    command.main(["layer_norm", *TINY, str(tmp_path / "again"), "--against", "eager"])
    printed = capsys.readouterr().out
    assert "best peer eager" in printed
    assert re.search(r"^slower than at \w+: layer_norm/tiny/fp32/bwd", printed, re.M)


@pytest.mark.parametrize(("name", "status"), [("ours", 1), ("peer", 0)])
def test_a_wrong_kernel_of_ours_fails_the_command(name, status, tmp_path, monkeypatch, capsys):
    case = attention(**{name: times(float("nan"))})
    monkeypatch.setattr(command, "cases", lambda *_, **options: [case])
    monkeypatch.setattr(measure, "machine_rates", lambda *_: RATES)
    assert command.main([*TINY, str(tmp_path)]) == status
    assert f"{name} not timed" in capsys.readouterr().out


def row_of(who, seconds, run="r1", case="attention/gpt2-124m/bf16/both", why=""):
    common = {"run": run, "device": "A GPU", "on": "cuda", "versions": {}, "commit": "abc"}
    figure = None if why else quantiles([seconds])
    return record(case, who, figure, why=why, bound="matmul", share=0.5, **common)


def test_the_newest_run_of_a_case_is_published_unless_ours_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    page, local = tmp_path / "page.md", tmp_path / "local"
    local.mkdir()
    page.write_text("by hand <!-- from the records --> old <!-- to here --> also")
    monkeypatch.setattr(report, "write_page", partial(report.write_page, page))

    def add(*rows):
        (local / "a-gpu.jsonl").write_text("\n".join(map(json.dumps, rows)))

    add(row_of("ours", 4e-3, "r0"), row_of("eager", 3e-3, "r0"))
    report.main([])
    step = row_of("fastgpt", 0.2, "r1", case="step/baby/B=16")
    alone = row_of("ours", 1e-3, "r2")  # without a peer, it replaces nothing
    add(row_of("ours", 2e-3), row_of("eager", 3e-3), step, alone)
    report.main([])
    assert [row["run"] for row in records.read()] == ["r1", "r1", "r1"]
    assert records.read(local) == [alone]
    text = page.read_text()
    assert "| attention/gpt2-124m/bf16 both | 2 | eager | 3 | 1.50x | 50% |  |" in text
    assert "| step/baby/B=16 | ms | **fastgpt** 200 | abc |" in text
    assert (text[:7], text[-4:]) == ("by hand", "also")
    assert (tmp_path / "page" / "ops.png").read_bytes().startswith(b"\x89PNG")
    add(row_of("ours", None, why="wrong: output 0"))
    with pytest.raises(UserError, match="ours failed attention/gpt2-124m/bf16/both: wrong"):
        report.main([])
    assert len(records.read(local)) == 1
