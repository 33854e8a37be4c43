"""Context parallelism: the ranks of a group compute parts of the same sequences.

`fastgpt.model.context_split` says which parts, and how attention is computed over them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastgpt.config.config import Config
from fastgpt.errors import UserError
from fastgpt.model.context_split import ContextShard
from fastgpt.parallel.mesh import context_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def check_context(config: Config) -> None:
    """Raises `UserError` if a setting does not go with `config.parallel.cp` ranks."""
    cp, context = config.parallel.cp, config.model.context
    if config.model.architecture != "gpt" or config.train.eval_tasks:
        raise UserError(
            f"--parallel.cp is {cp}: expected model.architecture gpt, and no --train.eval-tasks"
        )
    if context % (2 * cp):
        raise UserError(
            f"--parallel.cp is {cp}: expected --model.context to be a multiple of {2 * cp},"
            f" not {context}"
        )


def split_context(config: Config, mesh: DeviceMesh | None) -> ContextShard | None:
    """Returns this rank's part of sequences; None if each rank has its own.

    Args:
        mesh: from `fastgpt.parallel.mesh.arrange`.

    Raises:
        UserError: a setting does not go with it.
    """
    if config.parallel.cp == 1:
        return None
    check_context(config)
    assert mesh is not None
    context = context_of(mesh, config.parallel.cp)
    return ContextShard(context.get_local_rank(), context.size(), context.get_group())
