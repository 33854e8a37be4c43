"""The commands that a newcomer types run as they stand; all but the first at night."""

import os
import shlex
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT, ended

RUN = "runs/baby-20261120-101500"
COMMANDS = {  # each with a word of its last line
    "make train": "to train longer: ",
    f'python -m fastgpt.sample {RUN} --prompt "def main(" --n 3': "",
    f"python train.py --resume {RUN}": "to train longer: ",
    "python train.py shakespeare-cpu": "to train longer: ",
    "python train.py baby --data.source mybook.txt --steps 3000 --model.num-layers 6": "longer: ",
    "torchrun --nproc_per_node=8 train.py": "to train longer: ",
    "python -m fastgpt.prepare mybook.txt --out data/mine": "data/mine",
    f"python -m fastgpt.evaluate {RUN} --text mybook.txt": "bits_per_byte",
    "python -m fastgpt.doctor": "0 problems",
    "make bench": ".md",
}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """Makes a folder that looks like a checkout."""
    folder = tmp_path_factory.mktemp("checkout")
    names = ("train.py", "Makefile", "pyproject.toml", "constraints.txt", "fastgpt", "kernels")
    for name in (*names, "bench", "tests"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "mybook.txt").write_text(2000 * "the cat sat on the mat, and the dog on the log.\n")
    return folder


def last_line(command: str, checkout: Path) -> str:
    """Returns the last line that a command, which must succeed, prints in the checkout."""
    [run] = (checkout / "runs").glob("baby-*") if RUN in command else [Path()]
    words = shlex.split(command.replace(RUN, str(run)))
    if words[0] == "make":
        words[1:1] = ["--no-print-directory", "VENV=none", f"PYTHON={sys.executable}"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = ended(*words, cwd=checkout, timeout=1800, PATH=path, TRITON_INTERPRET=None)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout.rstrip().rpartition("\n")[2]


def test_make_train_trains(checkout, tmp_path):
    short = f"--steps 2 --eval-every 0 --data.final-eval-tokens 4096 --run-dir {tmp_path / 'run'}"
    assert "to train longer: " in last_line(f"make train ARGS='{short}'", checkout)


@pytest.mark.slow
@pytest.mark.xdist_group("commands")  # the first trains the run that others name
@pytest.mark.parametrize("command", COMMANDS)
def test_it_ends_well_and_says_so(command, checkout, request):
    if "shakespeare" in command:
        request.getfixturevalue("shakespeare")
    assert COMMANDS[command] in last_line(command, checkout)
