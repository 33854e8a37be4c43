"""`.ci/run`, with a stand-in for make that records its arguments."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.processes import ROOT

PARTS = ["lint", "test", "parity", "simgpu", "gate"]
MAKE = '#!/bin/sh\nline=$(printf "%s|" "$@")\necho "$line" >>log\n[ "$1 $2" != "{fails}" ]\n'


class Checkout:
    """A repository with `.ci/run` and the folders of two ops."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin = folder / "checkout", folder / "bin"
        (self.folder / ".ci").mkdir(parents=True)
        self.bin.mkdir()
        shutil.copy(ROOT / ".ci" / "run", self.folder / ".ci")
        for name in ("kernels/norm/spec.py", "kernels/rotary/spec.py", "kernels/aot.py", "a.py"):
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_text("1\n")
        self.git("init", "-q", "-b", "main")
        self.commit()

    def git(self, *words: str) -> None:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a", *words]
        subprocess.run(command, cwd=self.folder, check=True, capture_output=True)

    def commit(self, *changed: str) -> None:
        for name in changed:
            (self.folder / name).write_text("2\n")
        self.git("add", "-A")
        self.git("commit", "-q", "-m", "change")

    def run(self, *parts: str, fails: str = "") -> subprocess.CompletedProcess[str]:
        """Runs `.ci/run`; `made` has the arguments of each make."""
        (self.bin / "make").write_text(MAKE.format(fails=fails))
        (self.bin / "make").chmod(0o755)
        log = self.folder / "log"
        log.unlink(missing_ok=True)
        environment = os.environ | {"PATH": f"{self.bin}:{os.environ['PATH']}"}
        command = [str(self.folder / ".ci" / "run"), *parts]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        lines = log.read_text().splitlines() if log.exists() else []
        self.made = [line.split("|")[:-1] for line in lines]
        log.unlink(missing_ok=True)
        return done


@pytest.fixture
def checkout(tmp_path) -> Checkout:
    return Checkout(tmp_path)


def test_without_arguments_all_parts_run_and_say_how_long(checkout):
    done = checkout.run()
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^(\w+) passed in \d+ s$", done.stdout, re.M) == PARTS
    assert {"lint", "test", "parity", "simgpu-brief"} <= {words[0] for words in checkout.made}


def test_an_unknown_part_is_one_line_and_nothing_runs(checkout):
    done = checkout.run("lint", "foo")
    assert (done.returncode, done.stdout, checkout.made) == (2, "", [])
    assert done.stderr == f"error: foo is no part; expected some of: {' '.join(PARTS)}\n"


def test_a_part_that_fails_is_named_and_ends_it(checkout):
    done = checkout.run("parity", "lint", fails="parity ARGS=-m brief --dist worksteal")
    assert done.returncode == 1
    assert re.fullmatch(r"parity failed after \d+ s\n", done.stderr)
    assert [words[0] for words in checkout.made] == ["parity"]


GATE = [
    (("a.py",), []),
    (("kernels/norm/spec.py", "a.py"), [["op", "OP=norm"], ["budget"]]),
    (("kernels/aot.py",), [["budget"]]),
]


@pytest.mark.parametrize(("changed", "made"), GATE)
def test_the_gate_checks_the_ops_whose_folders_changed(checkout, changed, made):
    checkout.commit(*changed)  # on main, from the last commit
    assert checkout.run("gate").returncode == 0
    assert checkout.made == made
    checkout.git("update-ref", "refs/remotes/origin/main", "HEAD~1")
    (checkout.folder / "b.py").write_text("1\n")
    checkout.commit()  # on a branch, from where it left main
    checkout.run("gate")
    assert checkout.made == made


def test_in_a_clone_of_one_commit_the_gate_checks_every_op(checkout):
    assert checkout.run("gate").returncode == 0
    assert checkout.made == [["op", "OP=norm"], ["op", "OP=rotary"], ["budget"]]


def test_the_gate_fails_with_the_op(checkout):
    checkout.commit("kernels/norm/spec.py")
    done = checkout.run("gate", fails="op OP=norm")
    assert (done.returncode, checkout.made) == (1, [["op", "OP=norm"]])
