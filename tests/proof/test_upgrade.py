"""`python -m kernels.upgrade`: each kind of change for the worse is named, and decides."""

import copy
import json
import os
from importlib.metadata import version
from pathlib import Path

import pytest

from fastgpt.kernels import fences, upgrade
from tests.processes import python

FORM = {
    "registers": 40, "spilled": 0, "shared": 1000, "columns": 0, "instructions": 100,
    "units": {"alu": 60, "fp32": 40}, "mma": {"HGMMA": 4},
    "fences": {"bar.sync": 3, "fence.proxy.async": 1}, "blocks": 8, "clocks": 50.0, "problems": [],
}  # fmt: skip
RESULT = {"digests": {"output 0": "a"}, "errors": {"output 0": 1e-3}, "wrong": []}
REPORT = {"triton": "1", "forms": {"sm_90 k c": FORM}, "results": {"sm_90 op p bf16": RESULT}}
ERROR = {"error": "CompilationError: planted"}
CHANGES = [
    ("results", {"wrong": ["output 0: 2 > 1"]}, "tolerance: output 0: 2 > 1", True),
    ("results", {"digests": {"output 0": "b"}}, "bits: output 0 (error 1.00e-03 -> ", False),
    ("results", {"fault": "FaultError: race"}, "fault: FaultError: race", True),
    ("forms", ERROR, "compile: no longer compiles: CompilationError: planted", True),
    ("forms", {"registers": 80}, "registers: registers 40 -> 80", True),
    ("forms", {"registers": 43}, "registers: registers 40 -> 43", False),
    ("forms", {"spilled": 8}, "registers: spilled bytes 0 -> 8", True),
    ("forms", {"shared": 2000}, "shared: shared 1000 -> 2000", True),
    ("forms", {"problems": ["9 bytes of shared memory > 8"]}, "shared: 9 bytes of shared", True),
    ("forms", {"instructions": 120, "units": {"alu": 80, "fp32": 40}},
     "instructions: instructions 100 -> 120 (alu 60 -> 80)", True),
    ("forms", {"mma": {}}, "instructions: products by HGMMA 4 -> 0", True),
    ("forms", {"fences": {"bar.sync": 3}}, "fences: fence.proxy.async 1 -> 0", True),
    ("forms", {"fences": {"fence.proxy.async": 1}}, "fences: bar.sync 3 -> 0", False),
    ("forms", {"blocks": 4}, "ceiling: thread blocks on a multiprocessor 8 -> 4", True),
    ("forms", {"clocks": 60.0}, "ceiling: clocks of the main loops 50.0 -> 60.0", True),
    ("forms", {"clocks": 40.0}, "ceiling: clocks of the main loops 50.0 -> 40.0", False),
]  # fmt: skip


@pytest.mark.parametrize(("part", "change", "text", "worse"), CHANGES)
def test_a_change_is_named_and_decides(part, change, text, worse, tmp_path, capsys):
    new = copy.deepcopy({**REPORT, "triton": "2"})
    (name,) = new[part]
    new[part][name] = change if change is ERROR else {**new[part][name], **change}
    (finding,) = upgrade.compare(REPORT, new)
    assert f"{finding.kind}: {finding.text}".startswith(text)
    assert (finding.form, finding.worse) == (name, worse)
    for label, report in (("old", REPORT), ("new", new)):
        (tmp_path / f"{label}.json").write_text(json.dumps(report))
    paths = [str(tmp_path / f"{label}.json") for label in ("old", "new")]
    asked = ["--from", paths[0], "--to", paths[1], "--folder", str(tmp_path)]
    assert upgrade.main(asked) == worse
    verdict = "no, 1 is worse" if worse else "yes, nothing is worse (1 differs)"
    said = capsys.readouterr().out
    assert f"upgrade Triton 1 to 2? {verdict}" in said
    assert f"{'WORSE ' * worse}{name}: {text}" in said


def test_a_form_of_one_version_alone_is_worse():
    (finding,) = upgrade.compare(REPORT, {**REPORT, "triton": "2", "forms": {}})
    assert (finding.kind, finding.text, finding.worse) == ("compile", "only with 1", True)


def test_what_cannot_be_compared_is_exit_status_2(tmp_path, capsys, monkeypatch):
    folder = ["--folder", str(tmp_path)]
    assert upgrade.main(["--from", "no.json", "--to", "no.json", *folder]) == 2
    assert "no.json does not exist: expected a report" in capsys.readouterr().out
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    assert upgrade.main(["--from", "0.1", "--to", "0.2", *folder]) == 2
    assert "pip cannot install triton==0.1.*" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        upgrade.main(["--to", "newest"])
    assert ended.value.code == 2


def test_the_page_is_that_of_the_record():
    records = json.loads(upgrade.RECORD.read_text(encoding="utf-8"))
    assert upgrade.PAGE.read_text(encoding="utf-8") == upgrade.page(records)


PLANTED = {
    "tolerance": {"tolerance"},
    "order": {"bits"},
    "compile": {"compile", "fault"},
    "bounds": {"fault"},
    "fence": {"fences", "fault"},
    "race": {"fault"},
    "registers": {"registers"},
    "shared": {"shared"},
    "ceiling": {"ceiling"},
}
"""Flaw of `planted_upgrade` -> kinds that must be named, and none of the results' others."""


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("planted")
    done = python("-m", "tests.proof.planted_upgrade", folder, TRITON_INTERPRET=None)
    assert done.returncode == 0, done.stderr
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


@pytest.mark.skipif(
    fences.needs_fence(90), reason="this Triton leaves out the fence of the planted kernel itself"
)
@pytest.mark.parametrize("flaw", PLANTED)
def test_a_planted_change_is_found_end_to_end(planted, flaw):
    kinds = {f.kind: f.text for f in upgrade.compare(planted["none"], planted[flaw]) if f.worse}
    bits = {f.kind for f in upgrade.compare(planted["none"], planted[flaw])} & {"bits"}
    assert set(kinds) | bits >= PLANTED[flaw]
    assert (kinds.keys() | bits) & {"tolerance", "fault", "compile"} <= PLANTED[flaw]
    faults = {"bounds": "outside of", "fence": "fence.proxy.async", "compile": "planted"}
    assert faults.get(flaw, "") in kinds.get("fault", "")


@pytest.mark.slow
def test_a_version_beside_itself_differs_in_nothing(tmp_path):
    import triton

    installed = version("triton")
    (tmp_path / f"triton-{installed}").mkdir()
    (tmp_path / f"triton-{installed}" / "triton").symlink_to(Path(triton.__file__).parent)
    cache = os.path.join(os.environ["FASTGPT_CACHE"], "triton")
    done = python(
        "-m", "kernels.upgrade", "--to", installed, "--brief", "--op", "rotary",
        "--folder", tmp_path, TRITON_INTERPRET=None, TRITON_CACHE_DIR=cache,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"upgrade Triton {installed} to {installed}? yes, nothing differs" in done.stdout
    assert "sm_90 _rotary_kernel: 1 compiled\nrotary: 1 executed" in done.stdout
