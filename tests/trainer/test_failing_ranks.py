"""One failing rank ends the job on all ranks within 30 seconds, its own message first."""

import os
import subprocess
import sys
import time

import pytest

from tests.processes import ROOT

BOUND_S = 30


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "said", "tracebacks"),
    [
        ("exception", "RuntimeError: seeded fault", 1),
        ("user error", "[rank 2] error: seeded mistake", 0),
        ("killed", "error: rank 2 ended without an error message", 0),
        ("late", "error: rank 2 did not arrive within 5 s after this one", 0),
    ],
)
def test_all_ranks_end_and_the_message_comes_first(how, said, tracebacks, tiny, tmp_path):
    script = [sys.executable, "-m", "tests.trainer.failing_ranks", how, str(tmp_path)]
    process = subprocess.Popen(
        [*script, *tiny("--train.micro-batch 2 --eval-every 0")],
        cwd=ROOT, env={**os.environ, "FASTGPT_ARRIVAL_S": "5"}, start_new_session=True,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    _, errors = process.communicate(timeout=120)
    seconds = time.time() - (tmp_path / "failed").stat().st_mtime
    assert process.returncode == 1, errors
    assert seconds < BOUND_S, errors
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)  # nothing is left of the session
    before, _, after = errors.partition(said)
    assert after, errors
    assert "failed (exitcode:" not in before, "torchrun's report comes after the message"
    assert errors.count("/fastgpt/cli.py") == tracebacks, errors
    if how != "late":
        assert "rank 2 failed first" in after
