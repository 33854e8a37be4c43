"""Evaluates a model: `python -m fastgpt.evaluate MODEL --tasks hellaswag`."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from fastgpt import flags
from fastgpt.config.checks import POSITIVE, check_fields
from fastgpt.convert.source import open_model
from fastgpt.device import cpu, device
from fastgpt.errors import UserError, run_command, writing
from fastgpt.evaluate.harness import run_tasks
from fastgpt.evaluate.text import read_text, score_text
from fastgpt.files import write_atomically
from fastgpt.terminal import print_text, status, table

TaskMetric = tuple[str, str, float, int]
"""Task, metric, value, and the number of examples (of a text: tokens)."""
NAMES = ("task", "metric", "value", "examples")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateConfig:
    """Evaluates a model on tasks and texts."""

    model: Annotated[str, tyro.conf.Positional]
    """Model to evaluate: whatever fastgpt.load takes, such as a run or a folder of Hugging Face."""
    tasks: str = ""
    """Tasks of the lm-evaluation-harness, separated by commas. They need the package lm-eval."""
    text: str = ""
    """Text to compute bits per byte of: a file, a folder, or a prepared dataset, whose validation
    tokens are used."""
    include: Path | None = None
    """Folder with tasks of your own for the lm-evaluation-harness, as YAML files."""
    json: Path | None = None
    """File to write the results to, as JSON."""
    batch: Annotated[int, POSITIVE] = 16
    """Number of texts computed at once."""
    device: Literal["auto", "cuda", "xpu", "mps", "cpu"] = "auto"
    """Device to run on: cuda, cpu, or auto to choose. `auto` uses CUDA if it is available."""
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "fp32"
    """Precision of the matrix products. `auto` uses bf16 where the hardware multiplies it."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.tasks and not self.text:
            raise UserError("nothing to evaluate: expected --tasks or --text")


def evaluate(config: EvaluateConfig) -> list[TaskMetric]:
    """Scores the text, and runs the tasks.

    Raises:
        UserError: a task, a file or the model cannot be used.
    """
    names = [name.strip() for name in config.tasks.split(",") if name.strip()]
    if config.include and not (names and config.include.is_dir()):
        raise UserError(f"--include is {config.include}: expected a folder, with --tasks")
    if config.json is not None and not config.json.absolute().parent.is_dir():
        raise UserError(f"--json is {config.json}: expected a file in a folder that exists")
    on = device.pick_device(config.device, "--device")
    precision = device.pick_precision(config.precision, on, "--precision")
    source = open_model(config.model)
    if on == "cpu":
        cpu.prepare(compiled=False)
    tokenizer, model = source.known_tokenizer(), source.build_gpt(on)
    text = read_text(config.text, tokenizer) if config.text else None
    rows = []
    if names:
        how = {"device": on, "precision": precision, "batch": config.batch}
        rows = _rows(run_tasks(names, source, config.include, **how))
    if text is not None:
        with status() as show:
            options = {"device": on, "autocast": device.autocast(on, precision), "report": show}
            found, count = score_text(model, *text, batch=config.batch, **options)
        rows += [(config.text, *score, count) for score in found.items()]
    return rows


def _rows(results: dict) -> list[TaskMetric]:
    """Takes the metrics of tasks and groups out of the harness's results, without their errors."""
    counts = {task: count["effective"] for task, count in results["n-samples"].items()}
    return [
        (task, key.removesuffix(",none"), value, counts.get(task, found.get("sample_len", 0)))
        for task, found in results["results"].items()
        for key, value in found.items()
        if "," in key and "_stderr" not in key and not isinstance(value, str)
    ]


def main(argv: list[str]) -> None:
    """Runs the command line `argv`."""
    config = flags.command(EvaluateConfig, argv, prog="python -m fastgpt.evaluate")
    rows = evaluate(config)
    cells = ((*names, f"{x:.4f}", f"{count:,}") for *names, x, count in rows)
    print_text(table([NAMES, *cells], right=(2, 3)))
    if config.json is not None:
        # JSON has no infinity
        finite = [(*names, x if math.isfinite(x) else None, count) for *names, x, count in rows]
        content = json.dumps([dict(zip(NAMES, row)) for row in finite], indent=1)
        with writing(config.json):
            write_atomically(config.json, content.encode())


if __name__ == "__main__":
    run_command(main)
