"""`python -m kernels.aot`, run as a command, because this process may interpret kernels."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fastgpt.kernels import aot
from fastgpt.kernels.proof.report import OPS, flags
from fastgpt.kernels.proof.rules import ARCHS
from fastgpt.kernels.proof.sass import Loop, ceiling, loops
from tests.processes import ROOT, ended, python


def compiling(*args: object) -> subprocess.CompletedProcess[str]:
    # what is compiled is kept with the rest of what the tests keep: not in the user's cache
    cache = os.path.join(os.environ["FASTGPT_CACHE"], "triton")
    return python(*args, TRITON_INTERPRET=None, TRITON_CACHE_DIR=cache)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_every_shipped_configuration_compiles_well(arch):
    done = compiling("-m", "kernels.aot", "--arch", str(arch))
    assert done.returncode == 0, done.stdout + done.stderr
    kernels = set(re.findall(rf"^(_\w+_kernel) +sm_{arch} ", done.stdout, re.M))
    assert kernels > {"_norm_dots_kernel", "_attention_bwd_dkv_kernel", "_cross_entropy_fwd_kernel"}
    assert re.search(r"\n\d+ variants, 0 wrong\n$", done.stdout)


FAULTS = """
import json
from dataclasses import asdict
from fastgpt.kernels import aot
from fastgpt.kernels.proof.compile import compile_all
from fastgpt.kernels.proof.report import configs_of
from tests.proof.aot_faults import variants

configs = configs_of([90], variants=[variants])
print(aot.check(configs))
print(json.dumps([asdict(row) for row in compile_all(configs)]))
"""


@pytest.fixture(scope="module")
def faults():
    """Checks faulty kernels; returns the printed text, the number that are wrong, and the rows."""
    done = compiling("-c", FAULTS)
    *printed, wrong, rows = done.stdout.splitlines()
    rows = {r["config"]: r for r in json.loads(rows)}
    return SimpleNamespace(wrong=int(wrong), printed="\n".join(printed), rows=rows)


FOUND = {
    "spill": r"spills \d+ bytes",
    "too much shared memory": r"\d+ bytes of shared memory > 232448",
    "small for its instruction": "has no HGMMA",
    "broken": r"does not compile: .*NameError\('no_such_name is not defined'\).*",
}


def test_each_fault_is_found_and_no_other(faults):
    assert faults.wrong == len(FOUND)
    assert faults.rows.keys() == {*FOUND, "sound"}
    assert faults.rows["sound"]["mma"].keys() == {"HGMMA"}
    said = dict(re.findall(r"^sm_90 _\w+_kernel ([\w ]+): (.*)$", faults.printed, re.M))
    assert said.keys() == FOUND.keys()
    assert all(re.fullmatch(FOUND[config], text) for config, text in said.items()), said
    assert faults.printed.endswith("5 variants, 4 wrong")


def test_loops_are_counted_by_unit(faults):
    """The instructions counted in a loop agree with the work that its source does."""
    (square,) = faults.rows["sound"]["loops"]  # no loop: the whole kernel, 4 warps
    assert square["flops"] * 4 == 2 * 64**3
    assert square["units"]["tensor"] == 4
    assert square["bytes"] * 4 == 64 * 64 * (2 + 4)
    stream = max(faults.rows["too much shared memory"]["loops"], key=lambda loop: loop["bytes"])
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


def test_nothing_selected_is_an_error():
    done = compiling("-m", "kernels.aot", "--only", "no such kernel")
    said = "kernels.aot: no configuration matches --only no such kernel\n"
    assert (done.returncode, done.stdout) == (2, said), done.stderr


# --- against a commit -----------------------------------------------------------------------------

SOURCE = '''
import torch, triton
import triton.language as tl
from fastgpt.kernels.proof.compile import Variant
from fastgpt.kernels.runtime import launch

BIAS: tl.constexpr = 1

@triton.jit
def _add(x):
    return x + BIAS

@triton.jit
def _a_kernel(x_ptr, N: tl.constexpr):
    """Adds."""
    offs = tl.arange(0, N)
    tl.store(x_ptr + offs, _add(tl.load(x_ptr + offs)))

@triton.jit
def _b_kernel(x_ptr, N: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, N), 0.0)

def variants(arch):
    x = torch.empty(512, device="meta")
    for kernel in (_a_kernel, _b_kernel):
        for n in (64, 128):
            run = lambda kernel=kernel, n=n: launch(kernel, (1,), x, N=n, num_warps=1)
            yield Variant(f"N={n}", run, {"_b_kernel": "UTC"})
'''
CHANGES = {
    "nothing": (SOURCE, []),
    "comments": (SOURCE.replace("Adds.", "Sums.").replace("x + BIAS", "x  + BIAS  # !"), []),
    "a_helper": (SOURCE.replace("x + BIAS", "x - BIAS"), ["_a_kernel N=128", "_a_kernel N=64"]),
    "a_global": (SOURCE.replace("r = 1", "r = 2"), ["_a_kernel N=128", "_a_kernel N=64"]),
    "a_setting": (
        SOURCE.replace("num_warps=1", "num_warps=n // 64"),
        ["_a_kernel N=128", "_b_kernel N=128"],
    ),
    "a_label": (SOURCE.replace('f"N={n}"', 'f"{n} numbers"'), []),
    "a_variant": (SOURCE.replace("128)", "128, 256)"), ["_a_kernel N=256", "_b_kernel N=256"]),
    "fences": (SOURCE, ["_b_kernel N=128", "_b_kernel N=64"]),
}
SELECT = """
import importlib, json, sys
from fastgpt.kernels import fences
from fastgpt.kernels.proof.compile import fingerprint
from fastgpt.kernels.proof.report import configs_of, unknown

folder, *names = sys.argv[1:]
sys.path.insert(0, folder)
def configs(name):
    return configs_of([90], variants=[importlib.import_module(name).variants])

fences.needs_fence = lambda arch: True
known, found = [fingerprint(config) for config in configs("nothing")], {}
for name in names:
    if name == "fences":
        fences.KEY = "another"
    differing = unknown(configs(name), known)
    found[name] = sorted(config.key.removeprefix("sm_90 ") for config in differing)
print(json.dumps(found))
"""


def test_what_has_another_input_of_the_compiler_differs(tmp_path):
    for change, (source, _) in CHANGES.items():
        (tmp_path / f"{change}.py").write_text(source)
    done = compiling("-c", SELECT, str(tmp_path), *CHANGES)
    assert json.loads(done.stdout) == {name: differ for name, (_, differ) in CHANGES.items()}


GIT = ("git", "-c", "user.name=a", "-c", "user.email=a@b.c")


def commit(folder: Path) -> None:
    """Makes a folder a repository with all of its files in one commit."""
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "feat: kernels"]):
        assert ended(*GIT, *command, cwd=folder).returncode == 0


@pytest.mark.slow
def test_a_costlier_kernel_with_other_bits_fails_unless_a_commit_accepts_it(tmp_path):
    folder = tmp_path
    for name in ("fastgpt", "kernels", "simgpu/src"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
    commit(folder)
    environment = {"TRITON_INTERPRET": None, "PYTHONPATH": str(folder)}
    command = (sys.executable, "-m", "kernels.aot", "--op", "rotary", "--arch", "90", "--base")
    device = folder / "kernels" / "rotary" / "device.py"
    text = device.read_text()
    changed = text.replace("(x * sin + y * cos)", "(x * sin + y * cos + y * 3e-8 * tl.exp(x))")
    assert changed != text
    device.write_text(changed)
    done = ended(*command, cwd=folder, **environment)
    assert done.returncode == 1, done.stdout + done.stderr
    worse = [line for line in done.stdout.splitlines() if line.startswith("WORSE ")]
    assert any("sm_90 _rotary_kernel H=12 K=12 D=64 bfloat16: instructions" in x for x in worse)
    assert any(x.startswith("WORSE sm_90 rotary grouped fp32: bits: ") for x in worse)
    message = "feat: more\n\nKernel-cost: _rotary_kernel\nKernel-cost: sm_90 rotary grouped"
    ended(*GIT, "commit", "-q", "-am", message, cwd=folder)
    done = ended(*command, cwd=folder, **environment)  # the last commit
    assert done.returncode == 0, done.stdout + done.stderr
    assert "accepted sm_90 rotary grouped fp32: bits" in done.stdout
    assert re.search(r"\n\d of 6 variants differ from \w+, 0 findings are worse\n$", done.stdout)


@pytest.mark.parametrize(
    ("file", "ops"),
    [
        ("kernels/rotary/op.py", ["rotary"]),
        ("kernels/norm/new.py", ["norm"]),  # untracked
        ("kernels/rows.py", OPS),
        ("kernels/aot.py", []),
        ("kernels/proof/rules.py", []),
        ("fastgpt/cli.py", []),
    ],
)
def test_ops_with_changed_files_are_executed(file, ops, tmp_path, monkeypatch):
    monkeypatch.setattr(aot, "ROOT", tmp_path)
    for name in ("rotary/op", "rows", "aot", "proof/rules"):
        path = tmp_path / "kernels" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    commit(tmp_path)
    assert aot.touched_since("HEAD") == []
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text("changed = True\n")
    assert aot.touched_since("HEAD") == ops


def test_a_commit_may_lack_an_op():
    assert flags().parse_args(["--op", "new"]).op == ["new"]


def test_a_commit_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(aot, "ROOT", tmp_path)
    (tmp_path / "file").touch()
    commit(tmp_path)
    with pytest.raises(aot.BadUsageError, match=r"^git rev-parse nothing\^\{commit\}: .*nothing"):
        aot.git("rev-parse", "nothing^{commit}")
