"""One failing rank ends the job on all ranks within 30 seconds, its own message first.

Run as a module, `HOW FOLDER ARGV`, it trains on four ranks under torchrun's agent until rank 2
fails. They are forked after all imports, so that a case takes seconds. Rank 1 blocks outside of any
collective operation from the failing step on, as it would in one of NCCL's.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fastgpt import cli
from fastgpt.errors import UserError
from fastgpt.train import trainer
from tests.processes import ROOT


def rank(how: str, folder: Path, argv: list[str]) -> None:
    number, seed_dropout = int(os.environ["RANK"]), trainer.seed_dropout

    def failing_step(run):
        if run.step == 2 and number == 2:
            (folder / "failed").touch()
            fail(how)
        while run.step == 2 and number == 1:
            time.sleep(60)
        seed_dropout(run)

    trainer.seed_dropout = failing_step
    if how == "late":
        (folder / "failed").touch()
        time.sleep(600 * (number == 2))
    sys.argv = ["train.py", *argv]
    cli.main()


def fail(how: str) -> None:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("seeded fault") if how == "exception" else UserError("seeded mistake")


def main(how: str, folder: str, *argv: str) -> None:
    agent = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=4, rdzv_backend="c10d", max_restarts=0,
        rdzv_endpoint="127.0.0.1:0", start_method="fork", run_id="test",
    )  # fmt: skip
    try:
        elastic_launch(agent, rank)(how, Path(folder), argv)
    except ChildFailedError as error:
        sys.exit(f"rank {error.get_first_failure()[0]} failed first")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "said", "tracebacks"),
    [
        ("exception", "RuntimeError: seeded fault", 1),
        ("user error", "[rank 2] error: seeded mistake", 0),
        ("killed", "error: rank 2 ended without an error message", 0),
        ("late", "error: rank 2 did not arrive within 5 s: ", 0),
    ],
)
def test_all_ranks_end_and_the_message_comes_first(how, said, tracebacks, tiny, tmp_path):
    module = [sys.executable, "-m", "tests.faults.test_failing_ranks", how, str(tmp_path)]
    process = subprocess.Popen(
        [*module, *tiny("--train.micro-batch 2 --eval-every 0")], cwd=ROOT, start_new_session=True,
        env={**os.environ, "FASTGPT_ARRIVAL_S": "5"}, text=True, stderr=subprocess.PIPE,
    )  # fmt: skip
    _, errors = process.communicate(timeout=120)
    assert time.time() - (tmp_path / "failed").stat().st_mtime < 30, errors
    assert process.returncode == 1, errors
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)  # nothing is left of the session
    before, _, after = errors.partition(said)
    assert "failed (exitcode:" in after, errors
    assert "failed (exitcode:" not in before, "torchrun's report comes after the message"
    assert errors.count("/fastgpt/cli.py") == tracebacks, errors
    assert how == "late" or "rank 2 failed first" in after


if __name__ == "__main__":
    main(*sys.argv[1:])
