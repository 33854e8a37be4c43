"""Rules of compiled kernels, limits of loops, and comparisons: what is worse is named."""

import copy
from dataclasses import replace

import pytest

import simgpu.executor
from fastgpt.kernels.proof import execute, rules
from fastgpt.kernels.proof.compile import CompileResult
from fastgpt.kernels.proof.rules import compare
from fastgpt.kernels.proof.sass import Loop, ceiling, loops

FORM = {
    "error": "", "registers": 40, "spilled": 0, "shared": 1000, "columns": 0, "instructions": 100,
    "waits": False, "units": {"alu": 60, "fp32": 40}, "mma": {"HGMMA": 4},
    "fences": {"bar.sync": 3, "fence.proxy.async": 2}, "blocks": 8, "clocks": 50.0, "problems": [],
}  # fmt: skip
RESULT = {"fault": "", "digests": {"output 0": "a"}, "errors": {"output 0": 1e-3}, "wrong": []}
REPORT = {"forms": {"sm_90 k c": FORM}, "results": {"sm_90 op p bf16": RESULT}}
NO, SMALL, YES = "not worse", "worse between commits", "worse"
CHANGES = [
    ("results", {"wrong": ["output 0: 2 > 1"]}, "tolerance: output 0: 2 > 1", YES),
    ("results", {"digests": {"output 0": "b"}}, "bits: output 0 (error 1.00e-03 -> ", SMALL),
    ("results", {"fault": "FaultError: race"}, "fault: FaultError: race", YES),
    ("forms", {"error": "planted", "problems": ["does not compile: planted"]},
     "limits: does not compile: planted", YES),
    ("forms", {"spilled": 8, "problems": ["spills 8 bytes"]}, "limits: spilled 0 -> 8", YES),
    ("forms", {"problems": ["has no HGMMA"]}, "limits: has no HGMMA", YES),
    ("forms", {"waits": True, "problems": ["waits for a load that it has just asked for"]},
     "limits: waits False -> True", YES),
    ("forms", {"mma": {"HGMMA": 2}}, "limits: products by HGMMA 4 -> 2", NO),
    ("forms", {"registers": 80}, "registers: registers 40 -> 80", YES),
    ("forms", {"registers": 43}, "registers: registers 40 -> 43", SMALL),
    ("forms", {"registers": 30}, "registers: registers 40 -> 30", NO),
    ("forms", {"shared": 2000}, "shared: shared 1000 -> 2000", YES),
    ("forms", {"columns": 128}, "shared: columns 0 -> 128", YES),
    ("forms", {"instructions": 120, "units": {"alu": 80, "fp32": 40}},
     "instructions: instructions 100 -> 120 (alu 60 -> 80)", YES),
    ("forms", {"mma": {}}, "limits: products by HGMMA 4 -> 0", YES),
    ("forms", {"fences": {"bar.sync": 3}}, "fences: fence.proxy.async 2 -> 0", YES),
    ("forms", {"fences": {"bar.sync": 3, "fence.proxy.async": 1}},
     "fences: fence.proxy.async 2 -> 1", SMALL),
    ("forms", {"fences": {"fence.proxy.async": 2}}, "fences: bar.sync 3 -> 0", NO),
    ("forms", {"blocks": 4}, "ceiling: thread blocks on a multiprocessor 8 -> 4", YES),
    ("forms", {"clocks": 60.0}, "ceiling: clocks 50.0 -> 60.0", YES),
    ("forms", {"clocks": 51.0}, "ceiling: clocks 50.0 -> 51.0", SMALL),
]  # fmt: skip


@pytest.mark.parametrize(("part", "change", "text", "worse"), CHANGES)
def test_a_change_is_named_and_decides(part, change, text, worse, capsys):
    new = copy.deepcopy(REPORT)
    (name,) = new[part]
    new[part][name] |= change
    for growth in (0.0, 0.1):
        (finding,) = compare(REPORT, new, growth)
        assert str(finding).startswith(f"{name}: {text}")
        assert finding.worse == (worse == YES or (worse == SMALL and growth == 0))
        assert rules.show([finding]) == finding.worse
        assert ("WORSE " * finding.worse + str(finding)) in capsys.readouterr().out.splitlines()
        acceptable = finding.kind not in ("limits", "tolerance", "fault")
        assert rules.show([finding], [text[:8]]) == (finding.worse and not acceptable)
        assert ("accepted " in capsys.readouterr().out) == (finding.worse and acceptable)


def test_a_kernel_that_is_gone_is_worse_and_a_new_one_must_keep_the_rules():
    nothing = {"forms": {}, "results": {}}
    assert [str(f) for f in compare(REPORT, nothing) if f.worse] == ["sm_90 k c: compile: is gone"]
    assert compare(nothing, REPORT) == []
    spilling = {"forms": {"sm_90 k c": {**FORM, "problems": ["spills 8 bytes"]}}, "results": {}}
    assert [f.text for f in compare(nothing, spilling) if f.worse] == ["spills 8 bytes"]


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


def test_shared_memory_moves_128_bytes_a_clock():
    wavefronts = {
        "LDSM.16.MT88.4": 4, "LDSM.16.M88.2": 2, "LDS": 1, "LDS.U.64": 2, "STS.128": 4,
        "LDGSTS.E.BYPASS.128": 4, "LDG.E.128": 0, "LDGDEPBAR": 0, "SHFL.BFLY": 1,
    }  # fmt: skip
    for op, each in wavefronts.items():
        [loop] = loops("\n".join(f"/*{16 * i:04x}*/ {op} R1, [R2] ;" for i in range(20)))
        assert loop.wavefronts == 20 * each, op


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
    assert rules.wrong(row) == ["waits for a load that it has just asked for"] * waits
    assert not rules.wrong(replace(row, config="D=256 bfloat16 causal"))


def test_the_old_names_are_those_of_simgpus_executor():
    for name in simgpu.executor.__all__:
        with pytest.warns(DeprecationWarning, match=r"simgpu\.executor"):
            assert getattr(execute, name) is getattr(simgpu.executor, name)
