"""Runs that nothing interrupts, to compare others with."""

import pytest

from tests.runs import outcome

STEPS = "--steps 12 --model.dropout 0.2 --train.micro-batch 4"
OUTCOMES = {}


@pytest.fixture
def unbroken(fit, tmp_path):
    """Returns a function: the outcome of a run with these flags, which is trained once."""

    def run(*flags):
        if flags not in OUTCOMES:
            place = f"--run-dir {tmp_path / f'unbroken-{len(OUTCOMES)}'}"
            OUTCOMES[flags] = outcome(fit(STEPS, *flags, place))
        return OUTCOMES[flags]

    return run
