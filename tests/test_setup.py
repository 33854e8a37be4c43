"""The Makefile installs once, and never takes a half-made environment for a complete one.

`make` runs on a copy, with a stand-in for Python that records its arguments.
"""

import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# The stand-in answers one-liners with the real Python, under the version it claims to have;
# `-m venv` copies it into the environment, over nothing that is there, as the real one does. A file
# `pip` or `venv` beside the log is run with those.
STAND_IN = """#!/bin/sh
case "$1" in
    -V) echo '{version}'; exit ;;
    -c | -Ic) exec '{python}' -c "import sys
sys.modules.update(pip=sys, venv=sys, ensurepip={ensurepip}); sys.version_info = {version}
$2" ;;
esac
echo "$*" >>'{folder}/log'
[ "$2" != venv ] || [ -e "$3/bin" ] || {{ mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; }}
[ ! -e '{folder}/'"$2" ] || . '{folder}/'"$2"
[ "$2" != venv ] || touch "$3/pyvenv.cfg"
"""
PYTHONS = {"python3": (3, 11, 9), "new": (3, 12, 1), "old": (3, 8, 18), "bare": (3, 11, 9)}
REQUIREMENTS = ("pyproject.toml", "constraints.txt")
VENV, PIP = "-m venv .venv", "-m pip install -c constraints.txt -e "
CORE, DEV, BOTH = (f"{PIP}.{extras}" for extras in ("", "[dev]", "[dev,data]"))
TRAIN, TEST = "train.py baby", "-m pytest -q -m not slow -n auto --maxprocesses 4"
ON_CUDA = "-m pytest -q -rs -n auto --maxprocesses 8 --dist loadgroup -m gpu and not slow"
TARGETS = set(re.findall(r"^([a-z][\w-]*):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))


class Checkout:
    """A copy of the files for a set-up, in a folder whose name has a space."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.root, self.bin = folder, folder / "a checkout", folder / "bin"
        for place in (self.root / "examples", self.bin):
            place.mkdir(parents=True)
        for name in ("Makefile", "examples/first_model.ipynb", *REQUIREMENTS):
            os.utime(shutil.copy(ROOT / name, self.root / name), (1e9, 1e9))
        for name, version in PYTHONS.items():
            said = {"version": version, "ensurepip": "None" if name == "bare" else "sys"}
            script = STAND_IN.format(python=sys.executable, folder=folder, **said)
            (self.bin / name).write_text(script)
            (self.bin / name).chmod(0o755)

    def add_op(self, name: str) -> None:
        spec = self.root / "kernels" / name / "spec.py"
        spec.parent.mkdir(parents=True)
        spec.write_text("@triton.jit\n")
        with (self.root / "kernels" / "specs.py").open("a") as file:
            file.write(f"from .{name}.spec import SPECS\n")

    def make(self, args: str, fails: str | None = None, **environ: object) -> list[str]:
        """Returns the arguments of Python in `make`; with `fails` it must fail and print that."""
        (self.folder / "log").write_text("")
        env = {"PATH": f"{self.bin}:{os.environ['PATH']}"} | {k: str(v) for k, v in environ.items()}
        command = ["make", *args.split()]
        done = subprocess.run(command, cwd=self.root, env=env, capture_output=True, text=True)
        self.printed = done.stdout + done.stderr
        assert (done.returncode != 0) == (fails is not None), self.printed
        assert (fails or "") in self.printed
        return (self.folder / "log").read_text().splitlines()


@pytest.fixture
def checkout(tmp_path) -> Checkout:
    return Checkout(tmp_path)


@pytest.mark.parametrize(
    "steps",
    [
        [("train", [VENV, CORE, TRAIN]), ("train", [TRAIN]), ("test", [DEV, TEST])],
        [("test", [VENV, DEV, TEST]), ("test", [TEST]), ("train", [TRAIN])],
        [("setup", [VENV, DEV]), ("train RECIPE=pubmed", ["train.py pubmed"])],
        [("setup EXTRAS=dev,data", [VENV, BOTH]), ("train", [TRAIN]), ("test", [TEST])],
        [("setup PYTHON=new", [VENV, DEV]), ("setup", []), ("setup PYTHON=new", [])],
        [("setup", [VENV, DEV]), ("setup PYTHON=python3", []), ("setup PYTHON=new", [VENV, DEV])],
    ],
)
def test_what_is_there_is_not_installed_again(checkout, steps):
    assert [checkout.make(args) for args, _ in steps] == [calls for _, calls in steps]


@pytest.mark.parametrize("name", REQUIREMENTS)
def test_a_change_of_the_requirements_installs_again(checkout, name):
    checkout.make("setup")
    time.sleep(0.02)  # a kernel's clock for files may tick only every 10 ms
    (checkout.root / name).touch()
    (checkout.folder / "pip").write_text(f"sleep 0.1; touch {name}")  # changed during the install
    assert checkout.make("setup") == [DEV]
    (checkout.folder / "pip").unlink()
    assert checkout.make("setup") == [DEV]
    assert checkout.make("setup") == []


@pytest.mark.parametrize("before", [pytest.param("clean", marks=pytest.mark.slow), "test"])
@pytest.mark.parametrize(
    "end", [pytest.param("exit 1", marks=pytest.mark.slow), "kill -KILL $PPID $$"]
)
@pytest.mark.parametrize(("step", "args"), [("pip", "EXTRAS=data"), ("venv", "PYTHON=new")])
def test_what_was_cut_short_is_done_again_from_scratch(checkout, step, args, end, before):
    checkout.make(before)
    (checkout.folder / step).write_text(f"mkdir -p .venv/lib/half-a-package; {end}")
    checkout.make(f"setup {args}", fails="")
    (checkout.folder / step).unlink()
    assert checkout.make("train") == [VENV, CORE, TRAIN]
    assert not (checkout.root / ".venv" / "lib").exists()
    assert checkout.make("test") == [DEV, TEST]


@pytest.mark.parametrize(
    ("cpu", "gpu", "passes"),
    [(0, 0, True), (0, 5, True), (1, 0, False), (0, 1, False), (5, 5, False)],
)
def test_where_there_is_cuda_a_second_process_tests_it(checkout, cpu, gpu, passes):
    (checkout.folder / "torch.py").write_text("class cuda: is_available = lambda: True")
    code = f'case "$*" in *maxprocesses\\ 8*) exit {gpu};; *) exit {cpu};; esac'
    (checkout.folder / "pytest").write_text(code)
    calls = checkout.make("test", None if passes else "Error 1", PYTHONPATH=checkout.folder)
    assert calls == [VENV, DEV, TEST, ON_CUDA]
    assert f"\nexit status {cpu} without CUDA and {gpu} on it; " in checkout.printed


def test_a_second_make_keeps_out_of_a_running_install(checkout):
    (checkout.folder / "pip").write_text("[ -e second ] || ! make train >second 2>&1")
    assert checkout.make("train") == [VENV, CORE, TRAIN]
    assert "another make is installing" in (checkout.root / "second").read_text()


@pytest.mark.parametrize("damage", ["rm bin/python", "echo '#!/nowhere' >bin/python", "rm -r bin"])
def test_a_broken_environment_is_made_anew(checkout, damage):
    checkout.make("setup")
    subprocess.run(damage, shell=True, cwd=checkout.root / ".venv", check=True)
    assert checkout.make("setup") == [VENV, DEV]


def test_venv_and_python_are_honoured(checkout):
    checkout.add_op("norm")
    own = {"simgpu", "simgpu-brief", "simgpu-full", "rehearsal"}  # these have an environment
    targets = sorted(TARGETS - {"help", "clean", "setup"} - own)
    (checkout.root / ".benchmarks" / "here").mkdir(parents=True)
    (checkout.root / ".benchmarks" / "here" / "saved.json").touch()  # for bench-regress
    made, *work = checkout.make(f"{' '.join(targets)} OP=norm VENV=env")
    assert made == "-m venv env"
    (checkout.bin / "python3").unlink()
    work = [call for call in work if not call.startswith("-m pip install")]
    assert len(work) > len(targets)
    work = [call.replace("env/bin/python", str(checkout.bin / "new")) for call in work]
    assert checkout.make(f"{' '.join(targets)} OP=norm VENV=none PYTHON=new") == work
    assert not (checkout.root / ".venv").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("PYTHON=old", "error: fastgpt needs Python 3.11 or newer; old is 3.8.18\n"),
        ("PYTHON=old VENV=none", "error: fastgpt needs Python 3.11 or newer; old is 3.8.18\n"),
        ("PYTHON=bare", "error: bare has no venv or no ensurepip (Debian and Ubuntu: apt install"),
        ("PYTHON=nowhere", "nowhere: "),
        ("VENV=thesis", "error: VENV=thesis exists and is not a virtual environment"),
        ("VENV=", "error: VENV= exists and is not a virtual environment"),
        ("examples", "there is no target examples (make help lists them); files and flags go into"),
        ("tets", "there is no target tets (make help lists them); files and flags go into ARGS"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_touched(checkout, args, message):
    bin = checkout.root / "thesis" / "bin"
    bin.mkdir(parents=True)
    shutil.copy(checkout.bin / "python3", bin / "python")
    before = sorted(checkout.root.rglob("*"))
    assert checkout.make(f"train {args}", fails=message) == []
    assert sorted(checkout.root.rglob("*")) == before


def test_an_extra_that_does_not_exist_is_named_beside_those_that_do(checkout):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = " ".join(project["optional-dependencies"])
    message = f"error: there is no extra foo; expected some of: {extras}\n"
    assert checkout.make("setup EXTRAS=dev,foo", fails=message) == []
    assert not (checkout.root / ".venv").exists()


@pytest.mark.parametrize("args", ["op", "op OP=nrom", "op OP=proof"])
def test_an_op_that_does_not_exist_is_named_beside_those_that_do(checkout, args):
    checkout.add_op("norm")
    checkout.add_op("rotary")
    (checkout.root / "kernels" / "specs.py").write_text("from .rotary.spec import SPECS\n")
    assert checkout.make("op OP=norm", fails="error: add norm to kernels/specs.py") == []
    given = args.partition(" ")[2] or "OP="
    message = f"error: {given} is no op; expected one of: norm rotary\n"
    assert checkout.make(args, fails=message) == []
    assert not (checkout.root / ".venv").exists()


def test_help_is_the_default_and_lists_every_target(checkout):
    checkout.make("")
    assert set(re.findall(r"^make ([\w-]+) +\w", checkout.printed, re.MULTILINE)) == TARGETS
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert f"extras: {' '.join(extras)}\n" in checkout.printed


def test_every_requirement_is_pinned_exactly_once():
    def names(requirements: list[str]) -> list[str]:
        return [re.match(r"[\w.-]+", r)[0].lower().replace("_", "-") for r in requirements]

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    pins = re.findall(r"^[^#].*", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins)
    assert len(set(names(pins))) == len(pins)
    extras = project["project"]["optional-dependencies"].values()
    assert set(names(sum(extras, project["project"]["dependencies"]))) <= set(names(pins))
    assert set(project["build-system"]["requires"]) <= set(pins)
