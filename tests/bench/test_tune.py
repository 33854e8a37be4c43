"""The offline choice of attention's configurations, without a GPU: prediction, choice, tables."""

import json
import math
from dataclasses import replace

import pytest
import torch

from bench.timing import Samples, Timer
from bench.tune import __main__ as tune
from bench.tune import measure as tune_measure
from bench.tune.__main__ import choose, decision, read, write
from bench.tune.predict import FIRST_TILE, LATENCY, milliseconds, passes, product_clocks
from bench.tune.search import Candidate, Slot, bounded, candidates, slots
from fastgpt.kernels.attention import config as attention_config
from fastgpt.kernels.attention.config import TUNING, serves, trying
from fastgpt.kernels.attention.forward import _attention_fwd_kernel as FWD  # noqa: N812
from fastgpt.kernels.attention.plain import attention_mask
from fastgpt.kernels.attention.spec import STEPS
from fastgpt.kernels.proof.compile import CompileResult, Config
from fastgpt.kernels.proof.sass import DEVICES, Loop
from fastgpt.kernels.runtime import Launch
from tests.proof.test_aot import compiling

TABLES = sorted(path for path in TUNING.glob("*.json") if path.name != "budget.json")
SETTINGS = {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 3}
META = {**SETTINGS, "BLOCK_D": 64, "CAUSAL": True, "WINDOW": False, "GROUP": 1}
CASE = "D=64 bfloat16 causal"


def row(issued=400, waits=False, **changes):
    """Makes the compiler's result for a kernel of 8 warps with two loops, one twice as long."""
    loops = [Loop(n, {"fp32": n * issued}, 0, 0, waits=waits) for n in (1, 2)]
    made = CompileResult(FWD.__name__, 90, CASE, 8, 3, 120, loops=loops, instructions=3 * issued)
    return replace(made, **changes)


# --- prediction -----------------------------------------------------------------------------------


@pytest.mark.parametrize("tile", [(128, 64), (64, 128), (32, 32)], ids=str)
@pytest.mark.parametrize(
    ("causal", "window"), [(True, None), (False, None), (True, 256), (True, 100), (True, 1)]
)
@pytest.mark.parametrize("T", [1024, 1000])
def test_tiles_are_counted_as_a_dense_mask_shows_them(T, causal, window, tile):
    M, N = tile
    mask = attention_mask(T, T, causal=causal, window=window)
    keep = torch.ones(T, T, dtype=torch.bool) if mask is None else mask[0, 0]
    parts = [part for rows in keep.split(M) for part in rows.split(N, dim=1)]
    some = [part for part in parts if part.any()]
    whole = [part for part in some if part.all() and part.shape[1] == N]
    assert passes(T, M, N, causal, window) == (len(whole), len(some) - len(whole))


@pytest.mark.parametrize("wait", [0.0, LATENCY])
def test_the_time_is_that_of_passes_and_programs(wait):
    """The predicted time equals one computed by hand from loop iterations and programs.

    Computed by hand: 8 x 400 instructions at 4 a clock; fp32 and the products hide below.
    """
    H100 = DEVICES[90]
    full, masked = passes(1024, 128, 64, True, None)
    alone = 8 * 2 * 128 * 64 * 64 * 2 / 8 / H100.flops  # the products of a tile, in clocks
    one, two = (max(8 * n * 100, (alone + 8 * n * 100) / 2) for n in (1, 2))
    clocks = full * one + masked * two + ((full + masked) * wait + 8 * FIRST_TILE) / 2
    expected = 16 * 12 * clocks / 132 / 1.83e6
    assert milliseconds(row(waits=wait > 0), META, 16) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("call", "clocks"),
    [
        ((80, "fwd", 64, 64, 64), 2 * 2 * 64**3 / 2048),
        ((90, "dq", 128, 64, 64), 3 * 2 * 128 * 64 * 64 / 4096),
        ((90, "dkv", 32, 64, 64), 2 * 4 * 24 + 2 * 2 * 32),  # 24: 3 KB; 2 KB would take 16 of 32
        ((100, "fwd", 128, 128, 128), 8 * 64 + 8 * 64),  # 64: 8 KB, and the product as well
        ((100, "fwd", 128, 32, 64), 4 * 40 + 2 * 32),  # 40: 5 KB
        ((100, "fwd", 64, 32, 64), 4 * 24 + 2 * 32),
    ],
    ids=str,
)
def test_products_of_narrow_tiles_wait_for_their_operands(call, clocks):
    """The clocks equal those counted by hand, instruction by instruction of 16 columns' depth."""
    assert product_clocks(*call) == clocks


@pytest.mark.parametrize(
    ("arch", "N", "bits", "clocks"),
    [(90, 32, 16, 320), (89, 64, 32, 2 * 64 * 64 * 4 / DEVICES[89].l2)],
    ids=["operands in shared memory", "keys and values from L2"],
)
def test_a_pass_of_few_instructions_waits(arch, N, bits, clocks):
    """The predicted time equals one computed by hand."""
    device = DEVICES[arch]
    total = sum(passes(1024, 128, N, True, None)) * clocks + 8 * FIRST_TILE / 2
    expected = 16 * 12 * total / device.multiprocessors / device.ghz / 1e6
    found = milliseconds(row(issued=1, arch=arch), {**META, "BLOCK_N": N}, bits)
    assert found == pytest.approx(expected)


def test_nothing_is_predicted_of_an_unknown_arch_or_without_loops():
    assert milliseconds(row(arch=77), META, 16) is milliseconds(row(loops=[]), META, 16) is None


# --- choice ---------------------------------------------------------------------------------------


def candidate(time, problems=(), **settings):
    return Candidate({**SETTINGS, **settings}, problems=list(problems), predicted=time)


@pytest.mark.parametrize(
    ("shipped", "margin", "stays"),
    [(1.04, 0.05, True), (1.06, 0.05, False), (1.04, 0.0, False), (1.0, 0.0, True)],
)
def test_the_shipped_row_stays_within_the_margin(shipped, margin, stays):
    found = [candidate(1.0, num_warps=4), candidate(shipped)]
    assert choose(found, SETTINGS, margin) is found[stays]
    said = "the shipped row stays" if stays else "better than the shipped row: {'BLOCK_M': 128"
    assert decision(found[stays], SETTINGS, found).startswith(said)


def test_what_is_wrong_is_never_chosen():
    wrong = candidate(0.1, ["spills 8 bytes"], num_warps=4)
    slow = candidate(9.0, num_warps=2)
    assert choose([wrong, slow, candidate(1.0, ["spills 8 bytes"])], SETTINGS, 0.05) is slow
    assert choose([wrong], SETTINGS, 0.05) is None
    slow.measured, fast = math.inf, candidate(20.0, num_warps=4)  # not timed, where others were
    fast.measured = 30.0
    assert choose([slow, fast], SETTINGS, 0.05) is fast


def test_a_bound_on_registers_makes_room_for_one_more_block():
    best = Candidate(SETTINGS, rows=[row(registers=130)])  # one block of 8 warps
    assert bounded(90, [best]) == [{**SETTINGS, "maxnreg": 128}]
    assert bounded(90, [Candidate(SETTINGS, rows=[row(registers=250)])]) == []  # half is too few


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_each_row_of_a_table_has_a_slot_of_its_own(path):
    table = read(path)
    named = slots(table)
    assert len({slot.name() for slot in named}) == len(table)
    for settings, slot in zip(table, named, strict=True):
        assert slot.row() == {k: v for k, v in settings.items() if k in attention_config.KEYS}
        for D in slot.D:
            calls = [(slot.step, slot.bits, D, plain) for plain in (True, False)]
            served = [call for call in calls if serves(settings, call)]
            assert served == [c for c in calls if slot.plain in (None, c[3])]
        for tried in candidates(slot):
            assert tried["BLOCK_M"] % 16 == tried["BLOCK_N"] % 16 == 0


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_writing_changes_one_row(path, tmp_path):
    copy = tmp_path / path.name
    copy.write_text(path.read_text())
    before = read(path)
    slot = slots(before)[3]
    write(copy, slot, dict(list(before[3].items())[-4:]))
    assert copy.read_text() == path.read_text()  # the same settings: the same text
    write(copy, slot, {**SETTINGS, "maxnreg": 88})
    after = read(copy)
    assert after[3] == {**slot.row(), **SETTINGS, "maxnreg": 88}
    assert after[:3] + after[4:] == before[:3] + before[4:]


def test_an_arch_without_a_table_gets_its_own_from_the_safe_one(tmp_path, monkeypatch):
    (tmp_path / "default.json").write_text("the safe one")
    for module in (attention_config, tune):
        monkeypatch.setattr(module, "TUNING", tmp_path)
    path = tune.own_table(86)
    assert (path, path.read_text()) == (tmp_path / "sm_86.json", "the safe one")
    path.write_text("tuned")
    assert tune.own_table(86).read_text() == "tuned"


def test_a_tried_configuration_is_launched_and_then_no_longer():
    q = torch.empty(1, 1, 1, 64, dtype=torch.bfloat16)
    meta = {**META, "D": 64, "DOCS": False, "DROPOUT": False}
    before = attention_config.config("fwd", q, meta, 90)
    with trying("fwd", SETTINGS | {"num_warps": 1}):
        assert attention_config.config("fwd", q, meta, 90)["num_warps"] == 1
        assert attention_config.config("dq", q, meta, 90)["num_warps"] != 1
    assert attention_config.config("fwd", q, meta, 90) == before


# --- measuring, with a clock of our own -----------------------------------------------------------

SLOT = Slot("fwd", 32, (16,), True)


@pytest.fixture
def small(monkeypatch):
    """Replaces the timed shapes by ones that Triton's interpreter can run."""
    if torch.cuda.is_available():
        pytest.skip("needs the interpreter")
    monkeypatch.setattr(tune_measure, "here", lambda: 90)
    monkeypatch.setattr(tune_measure, "CHECKED_T", 40)
    monkeypatch.setattr(tune_measure, "SHAPES", {16: (1, 32, 2)})


def tile(M, N):
    return {"BLOCK_M": M, "BLOCK_N": N}


class Clock(Timer):
    """A fake timer that calls everything once and reports times of its own."""

    def __init__(self, *milliseconds):
        super().__init__("cpu")
        self.milliseconds, self.asked = milliseconds, []

    def interleave(self, rivals, *, seconds, rounds=None):
        self.asked.append((len(rivals), seconds))
        for timed in rivals.values():
            timed.call(timed.prepare())
        taken = ([ms / 1e3 for ms in times] for times in self.milliseconds)
        return {name: Samples(times) for name, times in zip(rivals, taken, strict=True)}


@pytest.mark.parametrize("step", STEPS)
def test_what_is_timed_is_the_step_alone(small, step, monkeypatch):
    ran = []
    monkeypatch.setattr(tune_measure, "_again", ran.append)
    wanted = [tile(16, 32), tile(32, 16)]
    calls = tune_measure.launches(step, wanted, (16, "causal"), 32, "cpu")
    ran.clear()
    for call in calls:
        call()
    assert [x.kernel.__name__ for x in ran] == [STEPS[step][0]] * 2
    assert [tile(x.meta["BLOCK_M"], x.meta["BLOCK_N"]) for x in ran] == wanted


def test_a_wrong_candidate_gets_no_time(small, tmp_path, monkeypatch):
    """A wrong candidate gets no time; the `top` best and the shipped one do.

    Of four tiles one is made wrong, one is beyond `top`, and the last is the shipped one.
    """
    right = tune_measure.attention

    def wrong(*args, **options):
        out = right(*args, **options)
        return out * 1.01 if attention_config._tried["fwd"]["BLOCK_M"] == 64 else out

    monkeypatch.setattr(tune_measure, "attention", wrong)
    config = Config(90, CASE, "", Launch(FWD, (), {**META, "BLOCK_D": 16}, (1,)))
    tried = [
        Candidate(tile(M, N), rows=[row()], predicted=n, configs=[config])
        for n, (M, N) in enumerate([(16, 16), (64, 16), (32, 16), (16, 32)])
    ]
    clock = Clock([3.0, 1.0, 2.0], [4.0, 5.0, 6.0])
    path = tune_measure.time_candidates(
        90, SLOT, tried, tried[-1].settings, 2, 1.0, timer=clock, folder=tmp_path / "machine"
    )
    assert clock.asked == [(2, 1.0)]
    assert [x.measured for x in tried] == pytest.approx([2.0, math.inf, math.inf, 5.0])
    assert [bool(x.problems) for x in tried] == [False, True, False, False]
    assert tried[1].problems[0].startswith("is wrong: output 0")
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    assert [x["milliseconds"]["p50"] for x in lines] == pytest.approx([2.0, 5.0])
    assert path.match(f"{tmp_path}/machine/*-tune.jsonl")
    for x in lines:
        assert {"device", "driver", "versions", "commit"} <= set(x)
        assert x["kind"] == "tune"
        assert x["milliseconds"]["samples"] == len(x["all_milliseconds"]) == 3
        assert x["shape"] == [1, 32, 2, 16]


@pytest.mark.parametrize("step", STEPS)
def test_all_masks_at_once_are_checked(small, step):
    assert tune_measure.complaints(step, tile(16, 32), (16, "docs window dropout"), 32, "cpu") == []


# --- the command ----------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would tune")
def test_without_a_gpu_it_is_said_in_one_line():
    done = compiling("-m", "bench.tune")
    said = "error: torch sees no CUDA device to time on; use --static to rank without one\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", said)


WRITING = """
import pathlib, sys
from fastgpt.kernels.attention import config as attention_config
from bench.tune import __main__ as tune
attention_config.TUNING = pathlib.Path(sys.argv[1])
sys.exit(tune.main(sys.argv[2:]))
"""


@pytest.mark.slow
@pytest.mark.every_change
def test_the_static_choice_is_written(tmp_path):
    """The choice by prediction alone is written to the table.

    Two candidates and the shipped one, which is made to spill, are compiled for sm_90.
    """
    tables = tmp_path / "tuning"
    tables.mkdir()
    slot, name = Slot("fwd", 16, (64,), True), "sm_90 fwd 16 bits D=64 plain"
    first, second, shipped = (
        {**SETTINGS, "BLOCK_M": M, "num_warps": w} for M, w in ((64, 4), (128, 8), (128, 1))
    )
    others = [x for x in read(TUNING / "sm_90.json") if not serves(x, ("fwd", 16, 64, True))]
    rows = [slot.row() | shipped, *others]
    (tables / "sm_90.json").write_text(json.dumps({"attention": rows}))
    within, kept = tmp_path / "within.json", tmp_path / "kept.json"
    within.write_text(json.dumps({name: [first, second]}))
    args = ("--static", "--arch", "90", "--only", name, "--write", "--within", within)
    done = compiling("-c", WRITING, *map(str, (tables, *args, "--json", kept)))
    assert done.returncode == 0, done.stderr
    assert "2 without problems; dropped: 1 spills" in done.stdout
    assert "predicted, not measured; sm_90: 1.83 GHz" in done.stdout
    assert read(tables / "sm_90.json") == [slot.row() | second, *others]
    assert json.loads(kept.read_text()) == {name: [second, first]}
