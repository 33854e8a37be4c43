"""One failing rank ends the job on all ranks within 30 seconds, its own message first."""

import os
import signal
import time
from unittest import mock

import pytest

from fastgpt import cli
from fastgpt.errors import UserError
from fastgpt.train import trainer
from tests.processes import Job


def train_and_fail(argv, how, failed):
    """Rank 2 fails at step 2, or arrives too late.

    Rank 1 then blocks outside of any collective operation, as it would in one of NCCL's.
    """
    rank, seed = int(os.environ["RANK"]), trainer.seed_dropout

    def fail_at_step_2(run):
        while run.step == 2 and rank == 1:
            time.sleep(60)
        if run.step == 2 and rank == 2:
            failed.touch()
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise (
                RuntimeError("seeded fault") if how == "exception" else UserError("seeded mistake")
            )
        seed(run)

    if how == "late" and rank == 2:
        failed.touch()
        time.sleep(600)
    with mock.patch.object(trainer, "seed_dropout", fail_at_step_2):
        cli.main(argv)


@pytest.mark.parametrize(
    ("how", "said", "told_torchrun", "tracebacks"),
    [
        ("exception", "RuntimeError: seeded fault", "RuntimeError: seeded fault", 1),
        ("user error", "[rank 2] error: seeded mistake", "error: seeded mistake", 0),
        ("killed", "error: rank 2 ended without an error message", "Signal 9", 0),
        ("late", "error: rank 2 did not arrive within 2 s: ", "error: rank 2 did not arrive", 0),
    ],
)
def test_all_ranks_end_and_the_message_comes_first(
    how, said, told_torchrun, tracebacks, tiny, tmp_path
):
    argv, failed = tiny("--train.micro-batch 2 --eval-every 0"), tmp_path / "failed"
    with Job(4, train_and_fail, argv, how, failed, FASTGPT_ARRIVAL_S="2") as job:
        status, _, errors = job.end()
    assert time.time() - failed.stat().st_mtime < 30, errors
    assert status == 1, errors
    before, _, after = errors.partition(said)
    assert "failed (exitcode:" in after, errors
    assert "failed (exitcode:" not in before, "torchrun's report comes after the message"
    assert errors.count("/fastgpt/cli.py") == tracebacks, errors
    assert told_torchrun in after
