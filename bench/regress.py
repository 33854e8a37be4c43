"""Checks if the ops became slower on this machine: `make bench-regress`, `python -m bench.regress`.

Times forward and backward of our ops together, one case of each. `--save` keeps the times as this
machine's baseline; later runs fail if the fastest round is over 10 % slower. The fastest round
counts, because other load on the machine only adds time. Baselines stay in the cache of the
machine; without one nothing is compared, and a line says so.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from bench import records
from bench.cases import cases
from bench.measure import timed_pass
from bench.timing import Timer
from fastgpt import flags
from fastgpt.device import device
from fastgpt.errors import UserError, run_command
from fastgpt.files import cache_dir, write_atomically

SLOWER = 1.1
"""Time over the baseline's from which an op counts as slower."""
ROUNDS = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Regress:
    """Compares the times of our ops with this machine's baseline."""

    save: bool = False
    """Save these times as the baseline."""
    only: str = ""
    """Time only cases whose names contain this text."""


def baseline(name: str) -> Path:
    """Returns the file of a device's baseline: milliseconds of the fastest round by case."""
    return cache_dir() / "regress" / f"{records.slug(name)}.json"


def time_ops(on: str, only: str) -> dict[str, float]:
    """Returns the milliseconds of the fastest round of each case."""
    timer, found = Timer(on), {}
    for case in cases(on, quick=True):
        if only not in case.name:
            continue
        timed = timed_pass(case, case.implementations["ours"](on), "both", case.inputs(on))
        found[case.name] = 1e3 * min(
            timer.interleave({"": timed}, seconds=0, rounds=ROUNDS)[""].device
        )
    if not found:
        raise UserError(f"--only {only}: no case has a name with it; python -m bench --list")
    return found


def main(argv: list[str]) -> int:
    asked = flags.parse(Regress, argv, prog="python -m bench.regress")
    on = device.pick_device("auto", "--device", ("cuda", "cpu"))
    path = baseline(records.described(on)["device"])
    before = json.loads(path.read_text()) if path.exists() and not asked.save else {}
    found = time_ops(on, asked.only)
    ratios = {name: ms / before[name] for name, ms in found.items() if name in before}
    records.show("case|fastest ms|time / baseline's", [
        (name, f"{ms:.4g}", f"{ratios[name]:.2f}" if name in ratios else "-")
        for name, ms in found.items()
    ])  # fmt: skip
    if asked.save:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(found, indent=1).encode())
    elif not ratios:
        print(f"no baseline for {path.stem}, so nothing was compared; --save makes one")
    slower = [name for name, ratio in ratios.items() if ratio > SLOWER]
    for name in slower:
        print(f"{name} takes {ratios[name]:.2f} times as long as in the baseline")
    return int(bool(slower))


if __name__ == "__main__":
    run_command(main)
