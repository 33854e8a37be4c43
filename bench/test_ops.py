"""Times the ops as cases of pytest-benchmark: `pytest bench --benchmark-only -k norm`.

The cases, passes and implementations are those of `python -m bench`; a peer that fails is skipped.
pytest-benchmark keeps, prints and compares the times: save the runs of two commits with
`--benchmark-autosave` and add `--benchmark-compare` to the second. On CUDA its times include the
host's part of a call; `python -m bench` leaves it out.
"""

import functools
from typing import Any

import pytest
import torch

from bench.measure import Checker, in_one_line, timed_pass
from bench.ops import Case, cases
from fastgpt.device import device

DEVICE = device.pick_device("auto", "--device", ("cuda", "cpu"))
checker_of = functools.lru_cache(maxsize=1)(functools.partial(Checker, on=DEVICE))


@pytest.mark.parametrize(
    ("case", "which", "name"),
    [
        pytest.param(case, which, name, id=f"{case.name}/{which}-{name}")
        for case in cases(DEVICE)
        for which in case.work()
        for name in case.implementations()
    ],
)
def test_op(case: Case, which: str, name: str, benchmark: Any) -> None:
    torch.compiler.reset()  # all cases compile the same code; together they pass a limit
    try:
        call = case.implementations()[name](DEVICE)
        benchmark.extra_info |= checker_of(case).check(name, call)
    except Exception as error:
        if name == "ours":
            raise
        pytest.skip(in_one_line(error))
    timed = timed_pass(case, call, which, case.inputs(DEVICE))

    def run(state: Any) -> None:
        timed.call(state)
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    benchmark.group = f"{case.name} {which}"
    prepared = lambda: ((timed.prepare(),), {})  # noqa: E731
    benchmark.pedantic(run, setup=prepared, rounds=20, warmup_rounds=1)
