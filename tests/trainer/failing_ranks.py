"""Four ranks that train under torchrun's agent until one of them fails: `HOW FOLDER ARGV`.

They are forked after all imports, so that a case takes seconds. Rank 1 blocks outside of any
collective operation from the failing step on, as it would in one of NCCL's.
"""

import os
import signal
import sys
import time
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fastgpt import cli, trainer
from fastgpt.errors import UserError

FAILING, BLOCKED = 2, 1


def fail(how: str) -> None:
    if how == "exception":
        raise RuntimeError("seeded fault")
    if how == "user error":
        raise UserError("seeded mistake")
    os.kill(os.getpid(), signal.SIGKILL)


def rank(how: str, folder: Path, argv: list[str]) -> None:
    number, step = int(os.environ["RANK"]), trainer.Engine.train_step

    def failing_step(self, stop=None):
        if self.step == 2 and number == FAILING:
            (folder / "failed").touch()
            fail(how)
        while self.step == 2 and number == BLOCKED:
            time.sleep(60)
        step(self, stop)

    trainer.Engine.train_step = failing_step
    if how == "late":
        (folder / "failed").touch()
        time.sleep(600 * (number == FAILING))
    sys.argv = ["train.py", *argv]
    cli.main()


def main() -> None:
    how, folder, *argv = sys.argv[1:]
    agent = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=4, rdzv_backend="c10d", max_restarts=0,
        rdzv_endpoint="127.0.0.1:0", start_method="fork", run_id="test",
    )  # fmt: skip
    try:
        elastic_launch(agent, rank)(how, Path(folder), argv)
    except ChildFailedError as error:
        print(f"rank {error.get_first_failure()[0]} failed first", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
