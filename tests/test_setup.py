"""The Makefile installs once, and never takes a half-made environment for a whole one.

`make` runs on a copy, with a stand-in for Python that writes down what it is asked to do.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# The stand-in answers one-liners with the real Python, under the version it claims to have;
# `-m venv` copies it into the environment, `-m pip` runs the test's own hook.
STAND_IN = """#!/bin/sh
case "$1 $2" in
    "-c "* | "-Ic "*)
        exec '{python}' -c "import sys
for name in 'pip', 'ensurepip', 'venv':
    sys.modules[name] = sys
sys.version_info = {version}
sys.hexversion = int('%02x%02x' % sys.version_info[:2], 16)
$2"
        ;;
esac
echo "$*" >>'{log}'
case "$2" in
    venv)
        mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && touch "$3/pyvenv.cfg"
        ;;
    pip)
        . '{log}.pip'
        ;;
esac
"""


class Checkout:
    """A copy of the files that a set-up reads, in a folder whose name holds a space."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "a checkout"
        self.root.mkdir()
        for name in ("Makefile", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, self.root)
        self.log = folder / "log"
        self.pip_does("exit 0")
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.python = self.stand_in("python3", (3, 11, 9))

    def stand_in(self, name: str, version: tuple[int, int, int]) -> Path:
        path = self.bin / name
        path.write_text(STAND_IN.format(python=sys.executable, version=version, log=self.log))
        path.chmod(0o755)
        return path

    def pip_does(self, script: str) -> None:
        Path(f"{self.log}.pip").write_text(script)

    def make(self, *args: str, fails: bool = False, **env: str) -> str:
        """Runs `make` and returns what it printed; what Python was asked to do is in `calls`."""
        self.log.write_text("")
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name not in {"VENV", "PYTHON", "EXTRAS", "ARGS"} and not name.startswith("MAKE")
        }
        done = subprocess.run(
            ["make", *args],
            cwd=self.root,
            env={**inherited, "PATH": f"{self.bin}:{os.environ['PATH']}", **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert (done.returncode != 0) == fails, done.stdout
        return done.stdout

    @property
    def calls(self) -> list[str]:
        return self.log.read_text().splitlines()


@pytest.fixture
def checkout(tmp_path) -> Checkout:
    return Checkout(tmp_path)


def install(extras: str) -> str:
    return f"-m pip install -c constraints.txt .{extras}"


TRAIN = "train.py baby"
TEST = "-m pytest -q -m not slow -n auto --maxprocesses 4"


def test_train_installs_the_core_once(checkout):
    checkout.make("train")
    assert checkout.calls == ["-m venv .venv", install(""), TRAIN]
    checkout.make("train")
    assert checkout.calls == [TRAIN]


def test_test_adds_dev_to_an_environment_once(checkout):
    checkout.make("train")
    checkout.make("test")
    assert checkout.calls == [install("[dev]"), TEST]
    checkout.make("test")
    assert checkout.calls == [TEST]


def test_an_environment_made_for_the_tests_serves_train(checkout):
    checkout.make("test")
    checkout.make("train")
    assert checkout.calls == [TRAIN]


def test_setup_installs_and_runs_nothing(checkout):
    checkout.make("setup", "EXTRAS=dev,data")
    assert checkout.calls == ["-m venv .venv", install("[dev,data]")]


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_a_change_of_the_requirements_installs_again(checkout, name):
    checkout.make("setup")
    path = checkout.root / name
    before = path.read_text()
    path.write_text(before + "# changed\n")
    checkout.make("setup")
    assert checkout.calls == [install("[dev]")]
    # The environment is no longer what it was at first, so going back is a change too.
    path.write_text(before)
    checkout.make("setup")
    assert checkout.calls == [install("[dev]")]


def test_a_failed_install_is_done_again_from_scratch(checkout):
    checkout.pip_does("exit 1")
    checkout.make("train", fails=True)
    assert checkout.calls == ["-m venv .venv", install("")]
    checkout.pip_does("exit 0")
    checkout.make("train")
    assert checkout.calls == ["-m venv .venv", install(""), TRAIN]


def test_an_install_killed_over_a_finished_one_is_done_again_from_scratch(checkout):
    checkout.make("train")
    checkout.pip_does("kill -KILL $PPID $$")
    checkout.make("test", fails=True)
    checkout.pip_does("exit 0")
    checkout.make("train")
    assert checkout.calls == ["-m venv .venv", install(""), TRAIN]


def test_a_second_make_keeps_out_of_a_running_install(checkout):
    checkout.pip_does("[ -e second ] || ! make train >second 2>&1")
    checkout.make("train")
    assert checkout.calls == ["-m venv .venv", install(""), TRAIN]
    output = (checkout.root / "second").read_text()
    assert "error: another make is installing into .venv" in output


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda venv: (venv / "bin" / "python").unlink(), id="no-python"),
        pytest.param(
            lambda venv: (venv / "bin" / "python").write_text("#!/nowhere"), id="dead-python"
        ),
        pytest.param(lambda venv: shutil.rmtree(venv / "bin"), id="no-bin"),
    ],
)
def test_a_broken_environment_is_made_anew(checkout, damage):
    checkout.make("setup", "VENV=env")
    damage(checkout.root / "env")
    assert "making it anew" in checkout.make("setup", "VENV=env")
    assert checkout.calls == ["-m venv env", install("[dev]")]


def test_another_python_asked_for_makes_the_environment_anew(checkout):
    checkout.make("setup")
    newer = checkout.stand_in("newer", (3, 12, 1))
    checkout.make("setup", f"PYTHON={newer}")
    assert checkout.calls == ["-m venv .venv", install("[dev]")]
    checkout.make("setup", f"PYTHON={newer}")
    assert checkout.calls == []


def test_the_default_python_takes_the_environment_as_it_is(checkout):
    checkout.make("setup")
    checkout.stand_in("python3", (3, 12, 1))
    checkout.make("setup")
    assert checkout.calls == []
    checkout.make("setup", PYTHON="python3")
    assert checkout.calls == ["-m venv .venv", install("[dev]")]


@pytest.mark.parametrize("target", ["setup", "train", "test", "test-full", "parity", "lint", "fmt"])
def test_venv_and_python_are_honoured(checkout, target):
    checkout.make(target, "VENV=env")
    assert checkout.calls[0] == "-m venv env"
    assert not (checkout.root / ".venv").exists()
    work = checkout.calls[2:]
    named = checkout.stand_in("named", (3, 11, 9))
    checkout.python.unlink()
    checkout.make(target, "VENV=none", f"PYTHON={named}")
    assert checkout.calls == [call.replace("env/bin/python", str(named)) for call in work]


@pytest.mark.parametrize("venv", [".venv", "none"])
def test_an_old_python_is_refused_before_anything_is_made(checkout, venv):
    old = checkout.stand_in("old", (3, 8, 18))
    output = checkout.make("train", f"PYTHON={old}", f"VENV={venv}", fails=True)
    assert f"error: fastgpt needs Python 3.11 or newer; {old} is 3.8.18\n" in output
    assert checkout.calls == []
    assert not (checkout.root / ".venv").exists()


def test_a_missing_python_is_named(checkout):
    output = checkout.make("train", "PYTHON=no-such-python", fails=True)
    assert "error: no-such-python was not found" in output


def test_a_python_without_ensurepip_is_told_so(checkout):
    real = checkout.python.read_text()
    lacking = real.replace(
        "\nsys.version_info", "\nsys.modules['ensurepip'] = None\nsys.version_info"
    )
    assert lacking != real
    checkout.python.write_text(lacking)
    output = checkout.make("train", fails=True)
    assert "has no venv or no ensurepip" in output
    assert not (checkout.root / ".venv").exists()


def test_a_folder_that_is_no_environment_is_left_alone(checkout):
    folder = checkout.root / "thesis"
    folder.mkdir()
    (folder / "chapter1.txt").write_text("dear to me")
    output = checkout.make("setup", "VENV=thesis", fails=True)
    assert "error: VENV=thesis exists and is not a virtual environment" in output
    assert (folder / "chapter1.txt").read_text() == "dear to me"


def test_help_is_the_default_and_lists_every_target(checkout):
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z][\w-]*):(?!=)", makefile, re.MULTILINE))
    assert {"setup", "train", "test", "lint"} <= targets
    listed = re.findall(r"^make ([\w-]+) +\w", checkout.make(), re.MULTILINE)
    assert sorted(listed) == sorted(targets)


def test_every_requirement_is_pinned_exactly_once():
    def name(requirement: str) -> str:
        return re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-")

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    names = [name(pin) for pin in pins]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins)
    assert len(set(names)) == len(names)
    wanted = [
        *project["project"]["dependencies"],
        *(r for extra in project["project"]["optional-dependencies"].values() for r in extra),
    ]
    assert {name(requirement) for requirement in wanted} <= set(names)
    assert set(project["build-system"]["requires"]) <= set(pins)
