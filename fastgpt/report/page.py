"""The page of a report, filled from the files of runs."""

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from fastgpt.commands import resume_command, sample_command
from fastgpt.config.checks import flag
from fastgpt.config.config import flat
from fastgpt.config.recipes import RECIPES
from fastgpt.errors import writing
from fastgpt.evaluate.validation import perplexity
from fastgpt.files import write_atomically
from fastgpt.report.curves import AXES, curves
from fastgpt.report.data import Run, evenly, finding, read_run
from fastgpt.terminal import short

MAX_ROWS = 40
"""Most rows in the table of logged figures."""
NAMES = (
    "step",
    "tokens",
    "minutes",
    "train_loss",
    "val_loss",
    "lr",
    "grad_norm",
    "tok_per_s",
    "mfu",
)


def write_report(paths: Sequence[Path], out: Path) -> None:
    """Writes the page of one run, or of several with their curves over each other.

    Args:
        out: the page to write or replace.

    Raises:
        UserError: a path is not a run, or the page cannot be written.
    """
    names = [path.resolve().name for path in paths]
    labels = [f"{n} ({i})" if names.count(n) > 1 else n for i, n in enumerate(names, start=1)]
    runs = [read_run(path, label) for path, label in zip(paths, labels)]
    script, figures = curves(runs)
    facts = [_facts(run) for run in runs]
    settings = [(name, *(x["settings"][name] for x in facts)) for name in facts[0]["settings"]]
    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True,
        trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.ChainableUndefined,  # a manifest may lack anything
    )  # fmt: skip
    env.filters |= {
        "short": short, "perplexity": perplexity, "median": np.median,
        "finite": lambda values: values[np.isfinite(values)],
        "elapsed": lambda minutes: timedelta(seconds=round(60 * min(minutes, 1e10))),
    }  # fmt: skip
    html = env.get_template("template.html").render(
        facts=facts, script=script, figures=figures, axes=AXES, title=" · ".join(labels),
        differences=[x for x in settings if any(y != x[1] for y in x[1:])], names=NAMES,
    )  # fmt: skip
    with writing(out):
        write_atomically(out, html.encode("utf-8", "replace"))


def _facts(run: Run) -> dict[str, Any]:
    """Returns what the page shows of one run."""
    command, ranks = (run.manifest.get(name) for name in ("command", "ranks"))
    resume = resume_command(run.path, ranks if isinstance(ranks, int) else 1)
    longer = f" --steps {2 * run.config.steps}" if run.last_step >= run.config.steps else ""
    typed = ["python", *map(str, command)] if isinstance(command, list) else []
    recipe = RECIPES.get(run.config.recipe, ("", run.config))[1]
    settings, usual = (flat(asdict(config)) for config in (run.config, recipe))
    changed = [(flag(k), x, usual[k]) for k, x in settings.items() if x != usual[k]]
    figures = run.evaluated if len(run.evaluated["step"]) > 2 else run.trained
    rows = zip(*(map(_number, figures[name].tolist()) for name in NAMES))
    manifest = {**run.manifest, "data.source": run.config.data.source}
    if isinstance(resumes := manifest.get("resumes"), list):
        manifest["resumes"] = dict(enumerate(resumes, start=1))
    return {
        "run": run, "finding": finding(run), "changed": changed,
        "commands": {"start": shlex.join(typed), "resume": resume + longer,
                     "sample": sample_command(run.checkpoint)},
        "manifest": sorted(flat(manifest).items()),
        "settings": {flag(name): value for name, value in settings.items()},
        "rows": evenly([*rows], MAX_ROWS),
    }  # fmt: skip


def _number(x: float) -> str:
    return "" if np.isnan(x) else f"{x:,.0f}" if x == round(x) else f"{x:.5g}"
