"""A run that is trained once, for the tests of commands that look at it."""

import importlib
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fastgpt.cli import configure
from fastgpt.train.trainer import Trainer
from tests.conftest import TINY


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Path:
    """Returns a run of 8 steps on characters, which no test may change."""
    folder = tmp_path_factory.mktemp("trained")
    text = folder / "text.txt"
    text.write_text("the cat sat on the mat, and the dog sat on the log. " * 14)
    place = ["--data.source", str(text), "--run-dir", str(folder / "run")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastgpt.device.device.measured_peak", lambda *_: 1e11)
        patch.setattr("fastgpt.logs.metrics.plot_losses", lambda _, path, title: path.touch())
        argv = ["baby", *TINY.split(), *place, "--data.tokenizer", "chars", "--log-every", "1"]
        Trainer(configure(argv)).fit()
    return folder / "run"


@pytest.fixture
def run(trained, tmp_path) -> Path:
    """Returns a copy of that run, which a test may change, resume or damage."""
    return shutil.copytree(trained, tmp_path / "run")


def main_of(name: str) -> Callable[[list[str]], object]:
    """Returns the main function of `python -m NAME`."""
    module = importlib.import_module(name)
    found = module if hasattr(module, "main") else importlib.import_module(f"{name}.__main__")
    return found.main
