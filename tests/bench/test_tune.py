"""The choice of attention's block sizes, without a GPU."""

from dataclasses import replace

import pytest
import torch

from bench import tune
from bench.tune import Candidate, Slot, choose, selected
from fastgpt.kernels.attention import config, spec
from fastgpt.kernels.proof.compile import CompileResult
from fastgpt.kernels.proof.sass import Loop

TILE = {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 3}
ROW = {"step": "fwd", "bits": 32, "D": 16, "plain": True}


@pytest.mark.parametrize(("bits", "issued", "waits", "clocks"), [
    (16, 400, False, 12 * (512 + 800) + 8 * (512 + 1600)),  # products, then 8 warps' rest
    (16, 400, True, 12 * (512 + 800 + 700) + 8 * (512 + 1600 + 700)),
    (32, 16, False, 20 * 2 * 64 * 64 * 4 / 34),  # keys and values from L2
])  # fmt: skip
def test_predicted_time_is_that_of_the_tiles(bits, issued, waits, clocks, monkeypatch):
    """A head of 512 tokens has 12 whole tiles and 8 that are masked, as counted by hand."""
    monkeypatch.setitem(spec.SHAPES, 64, (1, 512, 1))
    loops = [Loop(n, {"fp32": n * issued}, 0, 0, waits=waits) for n in (1, 2)]
    code = CompileResult(spec.FWD, 90, "", 8, 250, loops=loops)  # one block of 8 warps
    found = tune.predict(Slot(90, {**ROW, "bits": bits, "D": 64}), TILE, code)
    assert found == pytest.approx(clocks / 132 / 1.83e6)


def test_a_right_shipped_row_stays_within_the_margin():
    for shipped, problems, stays in ((1.04, [], True), (1.06, [], False), (0.9, ["spills"], False)):
        found = [Candidate(TILE, problems=problems, predicted=shipped)]
        found += [Candidate({}, predicted=1.0), Candidate({}, problems=["wrong"], predicted=0.1)]
        assert choose(found) is found[not stays]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs the interpreter")
@pytest.mark.parametrize(("step", "plain"), [("fwd", False), ("dq", True), ("dkv", False)])
def test_the_tried_kernel_alone_is_timed_and_no_wrong_one(step, plain, monkeypatch):
    monkeypatch.setitem(spec.SHAPES, 16, (1, 32, 4))
    monkeypatch.setattr(tune, "CHECKED", {"B": 1, "T": 40})
    op, ran = spec.ATTENTION_PACKED, []
    tiles = [{**TILE, "BLOCK_M": 16, "BLOCK_N": N} for N in (64, 16)]

    def wrong(*args, **options):
        return op.op(*args, **options) * (1.01 if config._tried[step]["BLOCK_N"] == 16 else 1)

    def noted(call, *args, **meta):
        return lambda: ran.append((meta["BLOCK_M"], meta["BLOCK_N"])) or call(*args, **meta)

    monkeypatch.setattr(spec, "ATTENTION_PACKED", replace(op, op=wrong))
    monkeypatch.setattr(tune, "partial", noted)
    found, timer = [Candidate(x, predicted=2.0) for x in tiles], tune.Timer("cpu")
    timer.interleave = lambda rivals, seconds: {x: [y.call(0) or 3e-3] for x, y in rivals.items()}
    (row,) = tune.measure(Slot(90, {**ROW, "step": step, "plain": plain}), found, timer, 1.0)
    assert [n for n, x in enumerate(ran) if x == (16, 64)] == [[*spec.STEPS].index(step), 3]
    assert found[1].problems[0].startswith("wrong: output 0")
    assert [x.time for x in found] == [pytest.approx(3.0), float("inf")]
    assert row["case"].startswith(f"tune/sm_90/{step} 32 bits D=16 ")
    assert (row["implementation"], row["predicted_ms"], row["BLOCK_N"]) == ("16x64 w8 s3", 2.0, 64)


def test_a_choice_is_written_into_the_own_table_of_the_arch(tmp_path, monkeypatch):
    text = config.table_path(90).read_text()
    monkeypatch.setattr(tune, "TUNING", tmp_path)
    (slot,) = selected([90], ["fwd 16 bits D=64 plain"])
    slot.write({**TILE, "num_stages": 4})
    tile = '"plain": true, "BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": '
    assert (tmp_path / "sm_90.json").read_text() == text.replace(f"{tile}3", f"{tile}4", 1)
