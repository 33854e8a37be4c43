"""Fixtures of all tests: a device, a seed, and a cache that is not the user's."""

import importlib.util
import os
import random
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings

from tests import interpreter, warm
from tests.executed import Counter
from tests.processes import Ranks

settings.register_profile("any machine", deadline=None)  # a busy one may take a second for any case
settings.load_profile("any machine")


SIMULATED = "SIMGPU" in os.environ
"""Whether the tests run on a simulated GPU (docs/proof.md)."""
IN_XDIST_WORKER = "PYTEST_XDIST_WORKER" in os.environ


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "run the kernels' tests without a GPU on code compiled for archs, such as sm_80,sm_90"
    parser.addoption("--execute", metavar="ARCHS", type=archs, help=text)
    text = "of the kernels' tests a short selection for the ops in kernels/OP, such as norm"
    parser.addoption("--op", metavar="OP", help=text)


def archs(text: str) -> list[int]:
    """Parses "sm_80,sm_90"."""
    return [int(arch.removeprefix("sm_")) for arch in text.split(",")]


def pytest_configure(config: pytest.Config) -> None:
    if not SIMULATED and not re.search(r"(?<!not )\bgpu\b", config.getoption("markexpr")):
        # a machine with CUDA then tests the same as one without
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        if config.getoption("execute") is None:
            # Triton reads it once, when it is imported: kernels then run, interpreted, on CPUs.
            assert "triton" not in sys.modules
            os.environ["TRITON_INTERPRET"] = "1"
            if importlib.util.find_spec("triton"):
                interpreter.make_faster()
    if config.getoption("execute") and not IN_XDIST_WORKER:
        config.pluginmanager.register(Counter())
    config.add_cleanup(warm.stop)
    if IN_XDIST_WORKER:
        # Workers share the cores among them already; the variable reaches what the tests start.
        os.environ["OMP_NUM_THREADS"] = os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        torch.set_num_threads(1)
        return
    # Set here and not in a fixture: modules are imported, and workers started, before any fixture.
    cache = tempfile.TemporaryDirectory(prefix="fastgpt-tests-")
    config.add_cleanup(cache.cleanup)
    os.environ["FASTGPT_CACHE"] = cache.name


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs CUDA, and to be asked for by -m gpu")
    if SIMULATED and item.get_closest_marker("cpu"):
        pytest.skip("is about a CPU")


def pytest_runtest_teardown(item: pytest.Item) -> None:
    if IN_XDIST_WORKER and torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # workers share the device's memory, too


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        terminalreporter.write_line("no test was selected: nothing was checked, which is a failure")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sends all tests with `ranks` to one worker, so that these are started once."""
    for item in items:
        if "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("ranks"))


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Two ranks of one process group, which start with the first call."""
    with Ranks(2) as two:
        yield two


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Seeds random numbers, so that they do not depend on earlier tests or on the worker."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def shakespeare() -> Path:
    """Path of tiny shakespeare; without it the test is skipped."""
    path = Path(os.environ.get("FASTGPT_DATA", "data"), "tinyshakespeare.txt").absolute()
    if not path.is_file():
        pytest.skip(f"FASTGPT_DATA has no {path.name}")
    return path


# --- tiny runs ------------------------------------------------------------------------------------

TINY = (
    "--model.num-layers 1 --model.num-heads 2 --model.dim 32 --model.context 16"
    " --model.vocab-multiple 100"  # 256 bytes padded to 300: whatever shows the padding is seen
    " --train.device cpu --train.batch-tokens 128 --train.precision fp32 --train.sample-tokens 4"
    " --optim.kind muon --optim.muon-lr 0.02 --optim.lr 4e-3 --optim.warmup-steps 2"
    " --steps 8 --log-every 1 --eval-every 4 --data.val-fraction 0.1 --track none"
)
ON_CUDA = (
    " --train.device cuda --train.compile off --ops.attention sdpa --ops.loss torch"
    " --ops.kernels torch"
)
"""Flags of a tiny run on a simulated GPU, where it takes no trials and compiles nothing."""


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A text so short that 8 sequences a step pass the end of an epoch every 5 steps."""
    path = tmp_path / "text.txt"
    path.write_text("the cat sat on the mat, and the dog sat on the log. " * 14)
    return path


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Uses one thread, also in processes that are started: tiny models are slower with more."""
    before = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def no_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves loss.png empty: to draw it takes longer than the steps of a tiny run."""
    monkeypatch.setattr("fastgpt.logs.metrics.plot_losses", lambda _, path, title: path.touch())


@pytest.fixture
def tiny(
    text: Path, tmp_path: Path, one_thread: None, no_curves: None, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[str]]:
    """Command line of a run that takes a moment, in `tmp_path / "run"`; flags given later win.

    In this process the machine's peak is not measured, because that takes time and other workers
    disturb it.
    """
    monkeypatch.setattr("fastgpt.device.device.measured_peak", lambda *_: 1e11)

    def argv(*flags: str) -> list[str]:
        place = ["--data.source", str(text), "--run-dir", str(tmp_path / "run")]
        where = ON_CUDA if SIMULATED else ""
        return ["baby", *(TINY + where).split(), *place, *" ".join(flags).split()]

    return argv


@pytest.fixture
def fit(tiny: Callable[..., list[str]]) -> Callable[..., Path]:
    """Trains a tiny run in this process; returns the run directory."""

    def run(*flags: str) -> Path:
        from fastgpt.cli import configure
        from fastgpt.train.trainer import Trainer

        config = configure(tiny(*flags))
        Trainer(config).fit()
        assert config.run_dir is not None
        return config.run_dir

    return run
