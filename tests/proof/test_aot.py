"""`python -m kernels.aot`: faulty kernels, changed kernels, and a comparison with a commit."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fastgpt.kernels import aot, fences
from fastgpt.kernels.proof.report import OPS, flags
from fastgpt.kernels.proof.rules import ARCHS, compare
from tests.processes import ROOT, ended, python

pytestmark = pytest.mark.xdist_group("aot")  # one worker compiles for all
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
"""Change -> source of a module, and the configurations that differ from `nothing`."""


def compiling(*args: object) -> subprocess.CompletedProcess[str]:
    # what is compiled is kept with the rest of what the tests keep: not in the user's cache
    cache = os.path.join(os.environ["FASTGPT_CACHE"], "triton")
    return python(*args, TRITON_INTERPRET=None, TRITON_CACHE_DIR=cache)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Reports of one process about faulty kernels, the changes and each planted flaw."""
    folder = tmp_path_factory.mktemp("planted")
    for change, (source, _) in CHANGES.items():
        (folder / f"{change}.py").write_text(source)
    done = compiling("-m", "tests.proof.planted", folder)
    assert done.returncode == 0, done.stderr
    reports = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    return SimpleNamespace(**reports.pop("found"), reports=reports)


FAULTY = {
    "spill": r"spills \d+ bytes",
    "too much shared memory": r"\d+ bytes of shared memory > 232448",
    "two stages": "waits for a load that it has just asked for",
    "small for its instruction": "has no HGMMA",
    "broken": r"does not compile: .*planted.*",
}


def test_each_fault_is_found_and_no_other(found):
    assert found.wrong == len(FAULTY)
    assert found.rows.keys() == {*FAULTY, "sound"}
    assert found.rows["sound"]["mma"].keys() == {"HGMMA"}
    said = dict(re.findall(r"^sm_90 _\w+_kernel ([\w ]+): (.*)$", found.printed, re.M))
    assert said.keys() == FAULTY.keys()
    assert all(re.fullmatch(FAULTY[config], text) for config, text in said.items()), said
    assert found.printed.endswith("6 variants, 5 wrong\n")


def test_loops_are_counted_by_unit(found):
    """The instructions counted in a loop agree with the work that its source does."""
    [product] = found.rows["sound"]["loops"]  # of 4 warps
    assert product["flops"] * 4 == 2 * 64**3
    assert product["units"]["tensor"] == 4
    assert product["bytes"] * 4 == 64 * 64 * 2
    stream = max(found.rows["too much shared memory"]["loops"], key=lambda loop: loop["bytes"])
    assert stream["bytes"] * 8 == 4 * 2**13
    assert stream["start"] > 0
    assert stream["units"]["fp32"] == 2**13 // (8 * 32)  # one addition each


def test_what_has_another_input_of_the_compiler_differs(found):
    assert found.differing == {name: differ for name, (_, differ) in CHANGES.items()}


PLANTED = {
    "tolerance": {"tolerance"},
    "order": {"bits"},
    "compile": {"limits", "fault"},
    "bounds": {"fault"},
    "fence": {"fences", "fault"},
    "race": {"fault"},
    "registers": {"registers", "limits"},  # one warp: mma.sync in place of wgmma
    "shared": {"shared"},
    "ceiling": {"ceiling"},
}
"""Flaw of `planted` -> kinds that must be named, and none of the results' others."""
TEXTS = {"bounds": "outside of", "fence": "fence.proxy.async", "compile": "planted"}


@pytest.mark.skipif(
    fences.needs_fence(90), reason="this Triton leaves out the fence of the planted kernel itself"
)
def test_each_planted_flaw_is_found_end_to_end(found):
    for flaw, expected in PLANTED.items():
        findings = compare(found.reports["none"], found.reports[flaw], growth=0.1)
        kinds = {f.kind: f.text for f in findings if f.worse or f.kind == "bits"}
        assert set(kinds) >= expected, flaw
        assert kinds.keys() & {"tolerance", "fault", "limits"} <= expected, flaw
        assert TEXTS.get(flaw, "") in kinds.get("fault", "")


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_every_shipped_configuration_compiles_well(arch):
    done = compiling("-m", "kernels.aot", "--arch", str(arch))
    assert done.returncode == 0, done.stdout + done.stderr
    kernels = set(re.findall(rf"^(_\w+_kernel) +sm_{arch} ", done.stdout, re.M))
    assert kernels > {"_norm_dots_kernel", "_attention_bwd_dkv_kernel", "_cross_entropy_fwd_kernel"}
    assert re.search(r"\n\d+ variants, 0 wrong\n$", done.stdout)


def test_nothing_selected_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(aot, "INTERPRETING", False)
    monkeypatch.setattr(aot, "configs_of", lambda archs, ops: [])
    assert aot.main(["--only", "no such kernel"]) == 2
    assert "no such kernel" in capsys.readouterr().out


GIT = ("git", "-c", "user.name=a", "-c", "user.email=a@b.c")


def commit(folder: Path) -> None:
    """Makes a folder a repository with all of its files in one commit."""
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "feat: kernels"]):
        assert ended(*GIT, *command, cwd=folder).returncode == 0


@pytest.mark.slow
def test_a_costlier_kernel_with_other_bits_fails_unless_a_commit_accepts_it(tmp_path):
    for name in ("fastgpt", "kernels", "simgpu/src"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=ignored)
    commit(tmp_path)
    environment = {"TRITON_INTERPRET": None, "PYTHONPATH": str(tmp_path)}
    command = (sys.executable, "-m", "kernels.aot", "--op", "rotary", "--arch", "90", "--base")
    device = tmp_path / "kernels" / "rotary" / "device.py"
    text = device.read_text()
    changed = text.replace("(x * sin + y * cos)", "(x * sin + y * cos + y * 3e-8 * tl.exp(x))")
    assert changed != text
    device.write_text(changed)
    done = ended(*command, cwd=tmp_path, **environment)
    assert done.returncode == 1, done.stdout + done.stderr
    worse = [line for line in done.stdout.splitlines() if line.startswith("WORSE ")]
    assert any("sm_90 _rotary_kernel H=12 K=12 D=64 bfloat16: instructions" in x for x in worse)
    assert any(x.startswith("WORSE sm_90 rotary grouped fp32: bits: ") for x in worse)
    message = "feat: more\n\nKernel-cost: _rotary_kernel\nKernel-cost: sm_90 rotary grouped"
    ended(*GIT, "commit", "-q", "-am", message, cwd=tmp_path)
    done = ended(*command, cwd=tmp_path, **environment)  # the last commit
    assert done.returncode == 0, done.stdout + done.stderr
    assert "accepted sm_90 rotary grouped fp32: bits" in done.stdout
    assert re.search(r"\n\d of 6 variants differ from \w+, 0 findings are worse\n$", done.stdout)


TOUCHED = {
    "kernels/rotary/op.py": ["rotary"],
    "kernels/norm/new.py": ["norm"],  # untracked
    "kernels/rows.py": OPS,
    "kernels/aot.py": [],
    "kernels/proof/rules.py": [],
    "fastgpt/cli.py": [],
}


def test_ops_with_changed_files_are_executed(tmp_path, monkeypatch):
    monkeypatch.setattr(aot, "ROOT", tmp_path)
    for name in TOUCHED:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.name != "new.py":
            path.write_text("")
    commit(tmp_path)
    assert aot.touched_since("HEAD") == []
    for name, ops in TOUCHED.items():
        (tmp_path / name).write_text("changed = True\n")
        assert aot.touched_since("HEAD") == ops, name
        commit(tmp_path)
    assert flags().parse_args(["--op", "new"]).op == ["new"]  # a commit may lack an op
    with pytest.raises(aot.BadUsageError, match="nothing"):
        aot.git("rev-parse", "nothing^{commit}")
