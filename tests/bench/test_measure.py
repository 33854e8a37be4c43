"""Benchmark cases: wrong kernels get no time, absent peers are named, each op's own are right."""

import re
from collections import defaultdict
from dataclasses import replace
from unittest import mock

import pytest
import torch

from bench import __main__ as command
from bench import measure, peers, records, report
from bench.cases import Case, cases
from bench.peers import MissingError, always
from bench.timing import Timer
from fastgpt.errors import UserError
from fastgpt.kernels.specs import SPECS
from tests.parity import backward_only, launches

PEAKS = {"matmul": 1e12, "copy": 1e10}
EAGER = SPECS["attention"].eager
RIGHT = always(EAGER)
"""Stand-in for our implementation in tests where Triton's interpreter would only take time."""


def case_of(name: str, **implementations) -> Case:
    """Returns the tiny case of an op, with some implementations replaced or added."""
    (case,) = cases("cpu", only=(f"{name}/*",), tiny=True)
    return replace(case, peers={**case.peers, **implementations})


def rows_of(case: Case) -> tuple[dict[str, list[str]], dict[str, list[dict]]]:
    """Measures a case; returns the kinds of rows, and the rows by implementation."""
    kinds, rows = defaultdict(list), defaultdict(list)
    for kind, row in measure.records_of(case, Timer("cpu"), PEAKS, seconds=0, rounds=2):
        kinds[row["implementation"]].append(kind)
        rows[row["implementation"]].append(row)
    return kinds, rows


def wrong_output(q, k, v):
    return 1.01 * EAGER(q, k, v)


def not_a_number(q, k, v):
    return EAGER(q, k, v) * float("nan")


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (wrong_output, "wrong: output 0"),
        (lambda q, k, v: EAGER(q, backward_only(k, 1.01), v), "wrong: gradient of k"),
        (not_a_number, "wrong: output 0"),
        (lambda *qkv: EAGER(*qkv)[..., :-1], "RuntimeError: Mismatch in shape"),
        (
            mock.Mock(side_effect=RuntimeError("no kernel image\nis available")),
            "RuntimeError: no kernel image",
        ),
        (mock.Mock(side_effect=AssertionError()), "AssertionError"),
    ],
    ids=["output", "gradient", "nan", "shape", "raises", "says nothing"],
)
def test_a_kernel_made_wrong_is_refused_a_time(wrong, why):
    kinds, rows = rows_of(case_of("attention", ours=always(wrong)))
    assert kinds["ours"] == ["refused"]
    assert why in rows["ours"][0]["reason"]
    assert "device_s" not in rows["ours"][0]
    assert kinds["eager"] == ["op"] * 3  # the others are timed nevertheless


def test_a_peer_that_is_beyond_the_rule_cannot_run_or_is_broken_costs_nobody_else_a_time():
    peer = {
        "slightly": always(wrong_output),
        "badly": always(lambda *qkv: 1.1 * wrong_output(*qkv)),
        "broken": mock.Mock(side_effect=AttributeError("no attend")),
    }
    kinds, rows = rows_of(case_of("attention", ours=RIGHT, **peer))
    assert kinds["ours"] == kinds["eager"] == kinds["slightly"] == ["op"] * 3
    assert kinds["badly"] == kinds["broken"] == ["refused"]
    assert "output 0" in rows["slightly"][0]["inexact"]
    assert "inexact" not in rows["eager"][0]
    assert rows["broken"][0]["reason"] == "AttributeError: no attend"
    for name in ("sdpa-cudnn", "flex", "flash-attn-2", "flash-attn-3", "flash-attn-4"):
        assert kinds[name] == ["missing"]
        assert "needs CUDA" in rows[name][0]["reason"]
    assert "--compiled" in rows["compiled"][0]["reason"]


def test_a_package_that_is_not_installed_is_named(monkeypatch):
    absent = mock.Mock(side_effect=ModuleNotFoundError("none"))
    monkeypatch.setattr(peers.importlib, "import_module", absent)
    with pytest.raises(MissingError, match="flash-attn 3 is not installed"):
        peers.ATTENTION["flash-attn-3"]("cuda")


def test_a_row_has_its_rates_and_its_share_of_the_limit():
    case = case_of("attention", ours=RIGHT)
    for row in rows_of(case)[1]["eager"]:
        flops, size = case.work()[row["pass"]]
        p50 = row["device_s"]["p50"]
        assert row["tflops"] == pytest.approx(flops / p50 / 1e12)
        assert row["gb_per_s"] == pytest.approx(size / p50 / 1e9)
        assert row["limit_s"] == max(flops / 1e12, size / 1e10)
        assert row["share"] == pytest.approx(row["limit_s"] / p50)
        assert row["host_s"]["samples"] == 2


@pytest.mark.parametrize("name", SPECS)
def test_ours_of_every_op_are_right_and_kernels_of_ours(name):
    case = case_of(name)
    checker = measure.Checker(case, "cpu")
    with launches(*case.spec.launches(case.shape)):
        assert checker.complaints(case.implementations["ours"]("cpu"))[0] == []


def test_long_sums_may_err_by_more_as_in_the_tests():
    case = case_of("linear")
    few = replace(case, spec=replace(case.spec, terms=lambda s: 64))
    many = replace(case, spec=replace(case.spec, terms=lambda s: 10**6))

    def off(*tensors):
        return torch.nn.functional.linear(*tensors) * (1 + 3e-6)

    assert measure.Checker(few, "cpu").complaints(off)[0]
    assert not measure.Checker(many, "cpu").complaints(off)[0]


def test_dropout_that_drops_too_much_is_refused():
    case = replace(case_of("dropout"), shape={"M": 100, "N": 200})
    checker = measure.Checker(case, "cpu")
    assert checker.complaints(case.implementations["ours"]("cpu"))[0] == []
    wrong, _ = checker.complaints(lambda x: torch.nn.functional.dropout(x, 0.25))
    assert len(wrong) == 2
    wrong, _ = checker.complaints(lambda x: torch.nn.functional.dropout(x, 0.2) * 1.02)
    assert len(wrong) == 1


def test_what_is_written_over_is_restored_before_each_call():
    case = case_of("cross_entropy")
    inputs, same = case.inputs("cpu"), case.inputs("cpu")  # random, and equal for all
    assert all(torch.equal(inputs[name], same[name]) for name in inputs)
    assert (inputs["logits"] != 0).all()
    before = inputs["logits"].detach().clone()
    for which in ("fwd", "bwd", "both"):
        call = case.implementations["ours"]("cpu")
        timed = measure.timed_pass(case, call, which, inputs)
        states = [timed.prepare() for _ in range(2)]  # as where several calls make one sample
        assert torch.equal(*[timed.call(state)[0] for state in states])
    assert torch.equal(inputs["logits"], before)


@pytest.mark.parametrize("which", ["bwd", "both"])
def test_the_gradient_from_above_a_loss_is_1_as_in_training(which):
    case = case_of("cross_entropy")
    call, inputs = case.implementations["eager"]("cpu"), case.inputs("cpu")
    timed = measure.timed_pass(case, call, which, inputs)
    (found,) = timed.call(timed.prepare())
    expected = torch.autograd.grad(call(*inputs.values()), inputs["logits"])[0]
    torch.testing.assert_close(found, expected)


# --- the command ----------------------------------------------------------------------------------

TINY = ("--device", "cpu", "--sizes", "tiny", "--rounds", "2", "--out")


def test_names_are_patterns_of_every_gpt2_size_and_of_long_sequences():
    sizes = [f"gpt2-{size}" for size in ("124m", "355m", "774m", "1558m")]
    expected = {f"attention/{size}/bf16" for size in sizes}
    expected |= {f"attention/{T}k-d{D}/bf16" for T in (4, 16) for D in (64, 128)}
    names = {case.name for case in cases("cuda", only=("attention/*",))}
    assert expected <= names
    assert all(name.startswith("attention/") for name in names)
    with pytest.raises(UserError, match=r"^nothing/\* matches no case"):
        [*cases("cuda", only=("nothing/*",))]


def test_a_run_writes_a_record_that_the_report_reads(tmp_path, capsys):
    out = str(tmp_path / "results" / "machine")
    command.main([*TINY, out, "--only", "attention/*/fp32", "layer_norm"])
    result = r"layer_norm/tiny/fp32 both: ours [\d.]+ ms, best peer \w+ [\d.]+ ms, [\d.]+x\n/.*\n$"
    assert re.search(result, capsys.readouterr().out)
    rows = records.read(tmp_path / "results")
    assert {row["kind"] for row in rows} == {"machine", "op", "missing"}
    for row in rows:
        assert {"device", "driver", "versions", "commit", "dirty", "settings", "run"} <= set(row)
        assert row["settings"]["clock"] == "perf_counter"
    timed = next(row for row in rows if row["kind"] == "op")
    assert {"before", "after", "device_s", "host_s", "share"} <= set(timed)
    text = report.write(tmp_path / "results", tmp_path / "docs").read_text()
    pages = sorted((tmp_path / "docs" / "benchmarks").glob("*.md"))
    assert "| tiny/fp32 | ours |" in pages[0].read_text()
    assert "flash-attn-3 | missing | needs CUDA" in text
    (found,) = (tmp_path / "docs" / "benchmarks").glob("*-roofline.png")
    assert found.read_bytes().startswith(b"\x89PNG")


def test_a_list_measures_nothing(capsys, tmp_path):
    command.main(["--list", "--device", "cpu", "--out", str(tmp_path / "none")])
    printed = capsys.readouterr().out
    assert "linear_cross_entropy/gpt2-124m/fp32" in printed
    assert "(flex)" in printed
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(("name", "status"), [("ours", 1), ("peer", 0)])
def test_a_kernel_of_ours_that_is_refused_fails_the_command(
    name, status, tmp_path, monkeypatch, capsys
):
    case = case_of("attention", **{"ours": RIGHT, name: always(not_a_number)})
    monkeypatch.setattr(command, "chosen", lambda bench, on: [case])
    assert command.main([*TINY, str(tmp_path)]) == status
    assert "not timed: wrong: output 0" in capsys.readouterr().out


def test_what_the_budget_leaves_out_is_said(tmp_path, capsys):
    command.main([*TINY, str(tmp_path), "--budget", "0", "--only", "rms_norm/*"])
    rows = [row for row in records.read(tmp_path) if row["kind"] == "missing"]
    assert [row["reason"] for row in rows] == ["over the budget of 0 s"] * len(rows) != []


@pytest.mark.parametrize(("visible", "index"), [(None, "1"), ("3,5", "5")])
def test_the_gpu_whose_clocks_are_read_is_the_one_that_runs(visible, index, monkeypatch):
    run = mock.Mock(side_effect=OSError)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(records.subprocess, "run", run)
    assert records.state("cuda") == {}
    assert run.call_args.args[0][-2:] == ["-i", index]


def test_an_op_without_a_gradient_is_checked_and_timed_forward():
    case = case_of("attention", ours=RIGHT, wrong=always(lambda *qkv: 2 * EAGER(*qkv)))
    case = replace(case, spec=replace(case.spec, differentiable=False))
    assert not any(x.requires_grad for x in case.inputs("cpu").values())
    kinds, _ = rows_of(case)
    assert kinds["ours"] == kinds["eager"] == ["op"]
    assert kinds["wrong"] == ["refused"]


def test_documents_have_peers_that_see_them():
    """Documents of two sequences that meet with the same number are still apart."""
    ids = torch.tensor([[1, 1, 4], [4, 4, 7]])
    offsets, longest = peers.boundaries(ids)
    assert (offsets.tolist(), longest) == ([0, 2, 3, 5, 6], 2)
    [case] = cases("cuda", only=("attention/documents*",))
    assert list(case.implementations) == ["ours", "eager", "compiled", "flex", "varlen"]
