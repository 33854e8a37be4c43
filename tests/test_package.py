"""The installed package: its files, and the `kernels` that a program imports.

Hugging Face has a distribution `kernels`. In the repository's root `import kernels` finds our
folder first, which stands for `fastgpt.kernels` and leads to the other for names that are not ours.
"""

import ast
import os
import re
import shlex
import shutil
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import fastgpt
from fastgpt import commands
from fastgpt.run import manifest
from tests.processes import ended

ROOT = Path(__file__).resolve().parent.parent
OTHERS = {  # another distribution's `kernels`, which imports itself by that name
    "__init__.py": "from kernels.load import get_kernel\nattention = 'theirs'\n",
    "load/__init__.py": "from kernels.version import NUMBER\ndef get_kernel(): return NUMBER\n",
    "version.py": "NUMBER = 17\n",
}
FROM_AN_EMPTY_FOLDER = """
import fastgpt, sys
assert "torch" not in sys.modules
import kernels
from fastgpt.kernels import attention
assert kernels.get_kernel() == 17
assert kernels.attention == "theirs"
print(fastgpt.GPT.__name__, fastgpt.__file__)
"""
FROM_THE_ROOT = """
import sys
import kernels, kernels.proof.compile
from kernels import attention, get_kernel
import fastgpt.kernels.proof.compile
from fastgpt import kernels as ours
assert get_kernel() == kernels.load.get_kernel() == 17
assert attention is kernels.attention is ours.attention
assert sys.modules["kernels.attention.op"] is sys.modules["fastgpt.kernels.attention.op"]
assert sys.modules["kernels.proof.compile"] is fastgpt.kernels.proof.compile
assert fastgpt.kernels.proof.compile.__spec__.name == "fastgpt.kernels.proof.compile"
assert not hasattr(ours, "get_kernel")
print(hasattr(kernels, "nothing"), fastgpt.__file__)
"""
ALONE = """
import sys, fastgpt.kernels
sys.path = [place for place in sys.path if not place.endswith("-packages")]
import kernels
print(hasattr(kernels, "rotary"), hasattr(kernels, "get_kernel"))
"""


def finish(*command: str | Path, cwd: Path, **env: str) -> str:
    """Returns the output of a process that starts in `cwd` and must succeed."""
    done = ended(*command, cwd=cwd, **{"PYTHONPATH": "", **env})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """Copies the repository, because building writes into it."""
    folder = tmp_path_factory.mktemp("clones") / "fastgpt"
    for name in ("fastgpt", "kernels", "bench", "tests"):
        ignored = shutil.ignore_patterns("__pycache__", "results")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "LICENSE", "train.py"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(source) -> Path:
    pip = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index"]
    finish(*pip, "-w", "dist", ".", cwd=source)
    [path] = (source / "dist").iterdir()
    return path


@pytest.fixture(scope="module")
def installed(request, source, wheel, tmp_path_factory) -> Path:
    """Makes an environment with the project and another `kernels`; returns its folder of commands.

    All that is installed where the tests run, such as torch, is available in it as well.
    """
    folder = tmp_path_factory.mktemp("environment")
    finish(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    [site] = folder.glob("lib/python*/site-packages")
    here = [path for path in sys.path if path.endswith("-packages")]
    pip = [sys.executable, "-m", "pip", "--python", folder, "install", "--no-deps", "--no-index"]
    if request.param == "wheel":
        finish(*pip, wheel, cwd=folder)
    else:
        setuptools = {"PYTHONPATH": os.pathsep.join(here)}
        finish(*pip, "--no-build-isolation", "-e", source, cwd=folder, **setuptools)
    (site / "here.pth").write_text("\n".join(here))
    for name, text in OTHERS.items():
        (site / "kernels" / name).parent.mkdir(parents=True, exist_ok=True)
        (site / "kernels" / name).write_text(text)
    return folder / "bin"


def test_the_wheel_holds_the_package_and_nothing_else(wheel, source):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    files = [*source.glob("fastgpt/**/*"), *source.glob("kernels/**/*")]
    kinds = (".py", ".json", ".toml", ".typed", ".html", ".css", ".js")
    paths = [str(file.relative_to(source)) for file in files if file.suffix in kinds]
    assert {"kernels/attention/tuning/default.json", "fastgpt/py.typed"} <= {*paths}
    assert names == {re.sub("^kernels/", "fastgpt/kernels/", path) for path in paths}
    assert wheel.name == f"fastgpt_triton-{fastgpt.__version__}-py3-none-any.whl"


@pytest.mark.parametrize(
    "installed", ["wheel", pytest.param("editable", marks=pytest.mark.slow)], indirect=True
)
def test_both_kernels_are_there_from_an_empty_folder_and_from_the_root(installed, source, tmp_path):
    python = installed / "python"
    name, place = finish(python, "-c", FROM_AN_EMPTY_FOLDER, cwd=tmp_path).split()
    assert name == "GPT"
    assert ROOT not in Path(place).parents
    answer = finish(python, "-c", FROM_THE_ROOT, cwd=source).split()
    assert answer == ["False", str(source / "fastgpt" / "__init__.py")]
    finish(python, "-c", "import fastgpt; fastgpt.load", cwd=source.parent)  # beside the clone
    module = finish(python, "-m", "kernels.aot", "--help", cwd=source)
    assert module.startswith("usage: python -m kernels.aot")


def test_without_another_distribution_an_unknown_name_is_an_attribute_error():
    assert finish(sys.executable, "-c", ALONE, cwd=ROOT) == "True False\n"


@pytest.mark.slow
@pytest.mark.parametrize("installed", ["wheel"], indirect=True)
def test_the_console_commands_train_sample_and_prepare(installed, tiny, text, tmp_path):
    def command(name: str, *argv: str | Path) -> str:
        path = f"{installed}:{os.environ['PATH']}"
        return finish(installed / name, *argv, cwd=tmp_path, PATH=path)

    for name in ("fastgpt-train", "fastgpt-sample", "fastgpt-prepare"):
        assert f"usage: {name}" in command(name, "--help")
    command("fastgpt-prepare", text, "--out", "data", "--tokenizer", "bytes")
    command("fastgpt-train", *tiny("--steps 4 --data.source data"))
    assert command("fastgpt-sample", "run", "--prompt", "the", "--tokens", "4")[:3] == "the"
    two = ("--nproc_per_node=2", "--no-python", "fastgpt-train", *tiny("--steps 6 --resume auto"))
    out = command("python", "-m", "torch.distributed.run", "--standalone", *two)
    assert "done after step 6: " in out
    [line] = [line for line in out.splitlines() if line.startswith("to train longer: ")]
    longer = shlex.split(line.removeprefix("to train longer: "))
    assert "done after step 12: " in finish(*longer, cwd=tmp_path)
    readme = (ROOT / "README.md").read_text()
    [example] = re.findall(r"```python\n(import fastgpt\n.*?)```", readme, re.S)
    example = example.replace("runs/baby-20261120-101500", "run").replace("def main(", "the")
    assert finish(installed / "python", "-c", example, cwd=tmp_path).startswith("the")


@pytest.mark.parametrize(
    ("checkout", "size", "said"),
    [
        (ROOT, 2, f"-m torch.distributed.run --nproc_per_node=2 {ROOT}/train.py"),
        (Path("/lib"), 1, "-m fastgpt.cli"),
    ],
)
def test_printed_commands_work_from_anywhere(checkout, size, said, monkeypatch):
    monkeypatch.setattr(commands, "CHECKOUT", checkout)
    monkeypatch.setattr(sys, "executable", "/p/python")
    monkeypatch.setattr("os.getcwd", lambda: "/here")
    resume = commands.resume_command(Path("a run"), size)
    assert resume == f"/p/python {said} --resume '/here/a run'"
    for version, first in (("1", ""), (None, f"cd {ROOT} && ")):
        monkeypatch.setattr(commands, "installed", lambda _, version=version: version)
        sample = f"{first}/p/python -m fastgpt.sample /a/run"
        assert checkout != ROOT or commands.sample_command(Path("/a/run")) == sample


def test_the_commit_of_a_checkout_around_the_package_is_not_ours(monkeypatch):
    monkeypatch.setattr(manifest, "__file__", f"{ROOT}/docs/kernels/run/manifest.py")
    monkeypatch.setenv("FASTGPT_COMMIT", "abc")
    assert manifest.provenance()["commit"] == "abc"


def test_names_for_type_checkers_are_those_that_are_there():
    tree = ast.parse((ROOT / "fastgpt" / "__init__.py").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    named = {a.asname: node.module for node in imports for a in node.names if a.asname}
    assert named == {name: f"fastgpt.{module}" for name, module in fastgpt._MODULES.items()}
    assert set(named) <= set(dir(fastgpt))
    for name, module in named.items():
        assert getattr(fastgpt, name) is getattr(sys.modules[module], name)
    with pytest.raises(AttributeError, match="module 'fastgpt' has no attribute 'nothing'"):
        _ = fastgpt.nothing


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
    versions = tomllib.loads((ROOT / "fastgpt" / "versions.toml").read_text())["pair"]
    [pair] = [pair for pair in versions if pair.get("pinned")]
    assert {f"{name}=={pair[name]}" for name in ("torch", "triton")} <= set(pins)
