"""Tasks of EleutherAI's lm-evaluation-harness, the optional package lm-eval.

The harness runs its own model for transformers, HFLM, on an export of ours.
"""

from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fastgpt.convert.source import OpenedModel
from fastgpt.convert.target import write_folder
from fastgpt.errors import UserError, brief

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
SHARD_BYTES = 2**33


def run_tasks(
    names: list[str],
    source: OpenedModel,
    include: Path | None,
    *,
    device: str,
    precision: str,
    batch: int,
) -> dict[str, Any]:
    """Runs tasks of the harness; returns its results, as `lm_eval.simple_evaluate` does.

    Args:
        include: folder with tasks of the user's own, as YAML.

    Raises:
        UserError: the package lm-eval is missing, a task is unknown, its data cannot be had, or
            transformers has no model like this one.
    """
    try:
        lm_eval, tasks = import_module("lm_eval"), import_module("lm_eval.tasks")
    except ModuleNotFoundError as error:
        raise UserError("--tasks needs the package lm-eval: make setup EXTRAS=dev,eval") from error
    try:
        manager = tasks.TaskManager(include_path=None if include is None else str(include))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--include {include} cannot be read: {brief(error)}") from error
    if unknown := sorted({*names} - {*manager.all_tasks}):
        raise UserError(
            f"unknown task {unknown[0]!r}: the harness lists its own with lm-eval ls tasks"
        )
    with TemporaryDirectory() as folder:
        write_folder(source, Path(folder, "model"), SHARD_BYTES)
        args = {"pretrained": str(Path(folder, "model")), "dtype": DTYPES[precision]}
        try:
            return lm_eval.simple_evaluate(
                model="hf", model_args=args, batch_size=batch, device=device,
                tasks=names, task_manager=manager, bootstrap_iters=0,
            )  # fmt: skip
        except (OSError, ValueError) as error:  # no network, no such dataset
            raise UserError(f"the harness cannot run {', '.join(names)}: {brief(error)}") from error
