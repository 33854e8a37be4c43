"""torchrun whose ranks are forks of its own process: `python -m tests.forkrun RANKS SCRIPT [ARGS]`.

`tests.warm` starts it as a fork, in turn, of a process that has imported the trainer.
"""

import runpy
import socket
import sys
from unittest import mock

from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fastgpt.logs import metrics


def run(script: str, *arguments: str) -> None:
    metrics.plot_losses = lambda records, path, title: path.touch()  # as the fixture `no_curves`
    sys.argv = [script, *arguments]
    if script == "-m":
        sys.argv = [*arguments]
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    # It asks for the GPUs, and a process that has asked for them has forks that cannot use them.
    with mock.patch("torch.cuda.is_available", return_value=False):
        config = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=int(sys.argv[1]), rdzv_backend="c10d",
            rdzv_endpoint=endpoint, start_method="fork", max_restarts=0,
        )  # fmt: skip
    elastic_launch(config, run)(*sys.argv[2:])
