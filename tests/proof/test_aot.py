"""`python -m kernels.aot`, run as a command, because this process may interpret kernels."""

import json
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from fastgpt.kernels.aot import ARCHS, BUDGET, check_budget, read_budgets, record, triton_minor
from fastgpt.kernels.attention.config import TUNING
from fastgpt.kernels.proof.compile import CompileResult
from fastgpt.kernels.proof.sass import Loop, ceiling, loops
from tests.processes import python

FAULTS = ("--modules", "tests.proof.aot_faults")


def compiling(*args: str) -> subprocess.CompletedProcess[str]:
    # what is compiled is kept with the rest of what the tests keep: not in the user's cache
    cache = os.path.join(os.environ["FASTGPT_CACHE"], "triton")
    return python(*args, TRITON_INTERPRET=None, TRITON_CACHE_DIR=cache)


def aot(tmp_path: Path, *args: str) -> tuple[int, str, list[dict]]:
    """Runs `python -m kernels.aot`; returns its exit status, its output, and the result rows."""
    out = tmp_path / "rows.json"
    done = compiling("-m", "kernels.aot", "--json", str(out), *args)
    assert not done.stderr
    rows = json.loads(out.read_text())["rows"] if out.exists() else []
    return done.returncode, done.stdout, rows


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_every_shipped_configuration_compiles_well(arch, tmp_path):
    code, printed, rows = aot(tmp_path, "--arch", str(arch))
    assert code == 0, printed
    compiled = {f"{r['kernel']} {r['config']}" for r in rows}
    assert compiled == read_budgets(BUDGET)[triton_minor()][str(arch)].keys()
    assert {r["arch"] for r in rows} == {arch}
    assert {r["kernel"] for r in rows} > {
        "_norm_dots_kernel", "_attention_bwd_dkv_kernel", "_cross_entropy_fwd_kernel"
    }  # fmt: skip
    for made in rows:  # products of sm_100 need tensor memory
        assert ("UTCHMMA" in made["mma"]) == (made["columns"] > 0)
    said = rf"{len(rows)} variants of \d+ configurations, 0 wrong, 0 without a recorded budget"
    assert re.match(rf"(?s)kernel .*\n{said}\n", printed)


def test_at_most_about_two_hundred_configurations_are_shipped():
    """At most 225 kernel configurations ship for tuned archs; the budget lists those of all archs.

    Configurations are each table row of each arch, and each set of sizes that a rule gives.
    """
    done = compiling("-c", COUNT)
    configurations, keys = json.loads(done.stdout)
    rows = sum(len(json.loads(path.read_text())["attention"]) for path in TUNING.glob("*.json"))
    assert configurations <= 230
    assert rows <= 120
    for version, archs in read_budgets(BUDGET).items():
        recorded = sorted(f"{arch} {key}" for arch, rows in archs.items() for key in rows)
        assert recorded == keys, f"Triton {version}: record what is shipped, and nothing else"


COUNT = """
import json
from fastgpt.kernels.aot import ARCHS, TUNED
from fastgpt.kernels.proof.compile import collect
from fastgpt.kernels.specs import VARIANTS
found = list(collect(VARIANTS, ARCHS))
keys = sorted(f"{config.arch} {config.key}" for config in found)
tuned = len({config.settings for config in found if config.arch in TUNED})
print(json.dumps([tuned, keys]))
"""


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    """Runs the command over faulty kernels, with a budget of one register for the sound one."""
    folder = tmp_path_factory.mktemp("faults")
    budget = folder / "budget.json"
    record(
        [CompileResult("_square_kernel", 90, "sound", registers=1, shared=1, instructions=1)],
        budget,
    )
    code, printed, rows = aot(folder, *FAULTS, "--arch", "90", "--budget", str(budget))
    return code, printed, {r["config"]: r for r in rows}


FOUND = {
    "spill": ["spills "],
    "too much shared memory": [" bytes of shared memory > 232448"],
    "small for its instruction": ["has no HGMMA"],
    "broken": ["NameError('no_such_name is not defined')"],
    "sound": [
        " registers > 1 recorded",
        " bytes of shared memory > 1 recorded",
        " instructions > 1 recorded",
    ],
}


@pytest.mark.parametrize("config", FOUND)
def test_each_fault_is_found_and_no_other(faults, config):
    code, printed, rows = faults
    assert code == 1
    problems = rows[config]["problems"]
    for problem, said in zip(problems, FOUND[config], strict=True):
        assert said in problem
    assert f"{config}: {'; '.join(problems)}" in printed


def test_faults_are_counted(faults):
    _, printed, rows = faults
    assert rows.keys() == FOUND.keys()
    assert rows["sound"]["mma"].keys() == {"HGMMA"}
    assert "5 variants of 4 configurations, 5 wrong, 4 without a recorded budget (make" in printed


def test_loops_are_counted_by_unit(faults):
    """The instructions counted in a loop agree with the work that its source does."""
    _, _, rows = faults
    (square,) = rows["sound"]["loops"]  # no loop: the whole kernel, 4 warps
    assert square["flops"] * 4 == 2 * 64**3
    assert square["units"]["tensor"] == 4
    assert square["bytes"] * 4 == 64 * 64 * (2 + 4)
    stream = max(rows["too much shared memory"]["loops"], key=lambda loop: loop["bytes"])
    assert stream["bytes"] * 8 == 4 * 2**13
    assert stream["start"] > 0
    assert stream["units"]["fp32"] == 2**13 // (8 * 32)  # one addition each


@pytest.mark.parametrize(
    ("loop", "bound", "clocks"),
    [
        (Loop(0, {"alu": 30, "fp32": 10}, 0, 0), "alu", 4 * 15),
        (Loop(0, {"alu": 10, "fp32": 30}, 4096, 0), "issue", 4 * 10),
        (Loop(0, {"mufu": 8, "fp32": 20}, 0, 0), "mufu", 4 * 16),
        (Loop(0, {"shared": 9, "global": 9, "fp32": 20}, 0, 0), "memory", 4 * 18),
        (Loop(0, {"tensor": 1}, 0, 2**20), "tensor", 4 * 256),
        (Loop(0, {"shared": 9, "fp32": 20}, 0, 0, 36), "shared", 4 * 36),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_the_busiest_unit_is_the_ceiling(loop, bound, clocks):
    top = ceiling(loop, 90, warps=4, registers=100, shared=50_000)
    assert (top.bound, top.clocks) == (bound, clocks)
    assert top.blocks == 4  # 104 registers for each of 128 threads; 51024 bytes of 233472
    assert top.gbytes == pytest.approx(132 * 1.83 * 4 * loop.bytes / clocks)
    assert top.tflops == pytest.approx(989.5 if bound == "tensor" else 0, rel=1e-3)
    assert ceiling(loop, 100, 4, 100, 50_000, columns=256).blocks == 2
    assert ceiling(loop, 77, warps=4, registers=100, shared=0) is None


@pytest.mark.parametrize(
    ("op", "wavefronts"),
    [
        ("LDSM.16.MT88.4", 4), ("LDSM.16.M88.2", 2), ("LDS", 1), ("LDS.U.64", 2), ("STS.128", 4),
        ("LDGSTS.E.BYPASS.128", 4), ("LDG.E.128", 0), ("LDGDEPBAR", 0), ("SHFL.BFLY", 1),
    ],
)  # fmt: skip
def test_shared_memory_moves_128_bytes_a_clock(op, wavefronts):
    code = "\n".join(f"/*{16 * i:04x}*/ {op} R1, [R2] ;" for i in range(20))
    [loop] = loops(code)
    assert loop.wavefronts == 20 * wavefronts


@pytest.mark.parametrize(
    ("body", "waits"),
    [
        (["DEPBAR.LE SB0, 0x0", "HGMMA.64x64x16.F32", "LDGDEPBAR"], True),
        (["DEPBAR.LE SB0, 0x1", "HGMMA.64x64x16.F32", "LDGDEPBAR"], False),
        (["LDGDEPBAR", "HMMA.16816.F32", "DEPBAR.LE SB0, 0x0"], False),
        (["LDGDEPBAR", "DEPBAR.LE SB0, 0x0", "HMMA.16816.F32"], True),
        (["LDG.E.128 R1, [R2]", "STS.128 [R3], R1", "HMMA.16816.F32"], True),
        (["LDG.E.128 R1, [R2]", "FFMA R3, R1"], False),
    ],
)
def test_a_loop_waits_for_a_load_that_it_has_just_asked_for(body, waits):
    """Two stages ask for the next tile behind the products and wait for it before the next ones."""
    ops = [*body, *["FADD R1"] * 16, "BRA 0x0"]
    [loop] = loops("\n".join(f"/*{16 * i:04x}*/ {op} ;" for i, op in enumerate(ops)))
    assert loop.waits == waits
    row = CompileResult("k", 90, "D=64 bfloat16 causal", loops=[loop])
    assert check_budget(row, {}) == ["waits for a load that it has just asked for"] * waits
    assert not check_budget(replace(row, config="D=256 bfloat16 causal"), {})


@pytest.mark.parametrize(
    ("recorded", "problems"),
    [
        ([10, 100, 1000], []),
        ([11, 101, 1001], []),
        (None, []),
        ([9, 100, 1000], ["10 registers > 9 recorded"]),
        ([10, 99, 1000], ["100 bytes of shared memory > 99 recorded"]),
        ([10, 100, 999], ["1000 instructions > 999 recorded"]),
    ],
)
def test_only_more_than_the_budget_is_a_fault(recorded, problems):
    row = CompileResult("k", 90, "c", registers=10, shared=100, instructions=1000)
    assert check_budget(row, {"k c": [*recorded, ""]} if recorded else {}) == problems


def test_recording_keeps_the_other_rows(tmp_path):
    path = tmp_path / "budget.json"
    path.write_text('{"0.1": {"90": {"k c": [1, 2, 3, "a"]}}}')
    good = CompileResult("k", 90, "c", registers=10, shared=100, instructions=7, fingerprint="b")
    record([good, CompileResult("k", 80, "d", error="?")], path)
    record([CompileResult("k", 90, "d", registers=20, shared=200)], path)
    assert read_budgets(path) == {
        "0.1": {"90": {"k c": [1, 2, 3, "a"]}},
        triton_minor(): {"90": {"k c": [10, 100, 7, "b"], "k d": [20, 200, 0, ""]}},
    }


def test_nothing_selected_is_an_error():
    done = compiling("-m", "kernels.aot", "--only", "no such kernel")
    said = "kernels.aot: no configuration matches --only no such kernel\n"
    assert (done.returncode, done.stdout) == (2, said), done.stderr
