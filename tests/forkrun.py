"""torchrun whose ranks have imported the trainer: `python -m tests.forkrun RANKS SCRIPT [ARGS]`.

They are forks of torchrun's own process, which saves each of them the seconds of importing torch.
"""

import runpy
import socket
import sys

from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tests.warm import IMPORTED


def run(script: str, *arguments: str) -> None:
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    for name in ("fastgpt.train.trainer", *IMPORTED):  # so that not each rank does
        __import__(name)
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=int(sys.argv[1]), rdzv_backend="c10d",
        rdzv_endpoint=endpoint, start_method="fork", max_restarts=0,
    )  # fmt: skip
    elastic_launch(config, run)(*sys.argv[2:])
