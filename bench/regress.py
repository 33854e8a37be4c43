"""Checks if the ops became slower on this machine: `make bench-regress`, `python -m bench.regress`.

pytest-benchmark times forward and backward of our ops, one case of each. `--save` keeps the times
as this machine's baseline; later runs fail if the fastest round is over 10 % slower. The fastest
round counts, because other load on the machine only adds time. Baselines stay in the cache of the
machine; without one nothing is compared, and a line says so.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import records
from bench.cases import Case, cases
from bench.measure import timed_pass
from bench.peers import MissingError
from fastgpt.device import device
from fastgpt.errors import run_command
from fastgpt.files import cache_dir

SLOWER = "min:10%"
ROUNDS, WARMUP_ROUNDS = 40, 3
BASELINE = "baseline"
ON = device.pick_device("auto", "--device", ("cuda", "cpu"))


# --- what pytest runs -----------------------------------------------------------------------------


@pytest.mark.parametrize("case", [*cases(ON, quick=True)], ids=lambda case: case.name)
def test_is_no_slower(case: Case, benchmark: Any) -> None:
    try:
        call = case.implementations["ours"](ON)
    except MissingError as reason:
        pytest.skip(str(reason))
    timed = timed_pass(case, call, "both", case.inputs(ON))

    def synchronized(state: Any) -> None:
        timed.call(state)
        if ON == "cuda":
            torch.cuda.synchronize()

    def setup() -> tuple[tuple[Any], dict[str, Any]]:
        return (timed.prepare(),), {}

    benchmark.pedantic(synchronized, setup=setup, rounds=ROUNDS, warmup_rounds=WARMUP_ROUNDS)


def pytest_benchmark_update_machine_info(config: Any, machine_info: dict[str, Any]) -> None:
    """Replaces the name of the host, which is private, by the device."""
    machine_info["node"] = ""
    machine_info["device"] = device.device_name(ON)


# --- the command ----------------------------------------------------------------------------------


def storage(name: str) -> Path:
    """Returns the folder of a device's baseline."""
    return cache_dir() / "regress" / records.slug(name)


def has_baseline(folder: Path) -> bool:
    from pytest_benchmark.utils import get_machine_id

    return any((folder / get_machine_id()).glob(f"*_{BASELINE}.json"))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.regress", description=__doc__)
    parser.add_argument("--save", action="store_true", help="save these times as the baseline")
    parser.add_argument("-k", default="", metavar="TEXT", help="only cases that contain TEXT")
    args = parser.parse_args(argv)
    name = device.device_name(ON)
    folder = storage(name)
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "bench.regress", __file__]
    command += [f"--benchmark-storage=file://{folder}", "--benchmark-columns=min,median,rounds"]
    command += ["-k", args.k] if args.k else []
    compare = not args.save and has_baseline(folder)
    if args.save:
        for old in folder.glob(f"*/*_{BASELINE}.json"):
            old.unlink()
        command += [f"--benchmark-save={BASELINE}"]
    elif compare:
        command += ["--benchmark-compare", f"--benchmark-compare-fail={SLOWER}"]
    status = subprocess.run([sys.executable, *command], cwd=Path(__file__).parents[1]).returncode
    if not args.save and not compare:
        print(f"no baseline for {name}, so nothing was compared; --save makes one")
    return status


if __name__ == "__main__":
    run_command(main)
