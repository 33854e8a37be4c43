"""The page of a report, filled from the files of runs."""

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from fastgpt.commands import install_command, resume_command, sample_command
from fastgpt.config.checks import flag
from fastgpt.config.config import flat
from fastgpt.config.recipes import RECIPES
from fastgpt.errors import UserError, counted, reason, writing
from fastgpt.evaluate.validation import perplexity
from fastgpt.files import write_atomically
from fastgpt.report.data import POINTS, Run, evenly, read_run
from fastgpt.terminal import short

MAX_ROWS = 40
"""Most rows in the table of logged figures."""
RISEN = 0.01
"""Share of the validation loss by which it must have risen to be called overfitting."""


def require_bokeh() -> None:
    """Raises `UserError` if the package that draws the curves is missing."""
    if find_spec("bokeh") is None:
        raise UserError(f"a report needs bokeh: {install_command('report', 'bokeh')}")


def write_report(paths: Sequence[Path], out: Path, text: str = "") -> None:
    """Writes the page of one run, or of several with their curves over each other.

    Args:
        out: the page to write or replace.
        text: the text to colour; if empty, the validation text of each run.

    Raises:
        UserError: a path is no run, or the page cannot be written.
    """
    from fastgpt.report.curves import curves  # which needs bokeh

    names = [path.resolve().name for path in paths]
    labels = [f"{n} ({i})" if names.count(n) > 1 else n for i, n in enumerate(names, start=1)]
    runs = [read_run(path, label) for path, label in zip(paths, labels)]
    script, figures = curves(runs)
    facts = [_facts(run, text) for run in runs]
    settings = {name: [one["settings"][name] for one in facts] for name in facts[0]["settings"]}
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    env = jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.ChainableUndefined,  # a manifest may lack anything
    )  # fmt: skip
    env.filters |= {"short": short, "elapsed": _elapsed, "perplexity": perplexity}
    html = env.get_template("template.html").render(
        facts=facts, script=script, figures=figures, title=" · ".join(labels), points=POINTS,
        differences={name: x for name, x in settings.items() if any(y != x[0] for y in x)},
        thinned=any(len(run.columns["step"]) > POINTS for run in runs),
    )  # fmt: skip
    with writing(out):
        write_atomically(out, html.encode("utf-8", "replace"))


def _facts(run: Run, text: str) -> dict[str, Any]:
    """Returns what the page shows of one run."""
    from fastgpt.report.tokens import coloured_text  # which needs torch, slow to import

    coloured = None
    try:
        coloured = coloured_text(run, text)
    except (UserError, OSError) as error:
        if text:
            raise UserError(f"--text is {text}: {reason(error)}") from error
        run.notes.append(f"There is no coloured text: {error}.")
    command, ranks = (run.manifest.get(name) for name in ("command", "ranks"))
    resume = resume_command(run.path, ranks if isinstance(ranks, int) else 1)
    longer = f" --steps {2 * run.config.steps}" if run.last_step >= run.config.steps else ""
    typed = ["python", *map(str, command)] if isinstance(command, list) else []
    recipe = RECIPES.get(run.config.recipe, ("", run.config))[1]
    evaluated = np.flatnonzero(np.isfinite(run.columns["val_loss"])).tolist()
    rows = evaluated if len(evaluated) > 2 else range(len(run.columns["step"]))
    return {
        "run": run, "text": coloured, "finding": finding(run), "rows": evenly(rows, MAX_ROWS),
        "commands": {"start": shlex.join(typed), "resume": resume + longer,
                     "sample": sample_command(run.checkpoint)},
        "settings": {flag(name): value for name, value in flat(asdict(run.config)).items()},
        "recipe": {flag(name): value for name, value in flat(asdict(recipe)).items()},
    }  # fmt: skip


def finding(run: Run) -> str:
    """Says in words how the validation loss went, and since when the model has overfitted."""
    losses, compared = run.columns["val_loss"], run.columns["compared"]
    at, differing, other = np.isfinite(compared), np.isfinite(losses) & (losses != compared), ""
    step, loss, size = (run.columns[name][at] for name in ("step", "compared", "val_tokens"))
    if at.any() and differing.any():
        names = ("step", "val_tokens", "val_loss")
        when, used, alone = (run.columns[name][differing][-1] for name in names)
        other = f" At step {when:,.0f} the loss over {used:,.0f} tokens was {alone:.4f},"
        other += f" not comparable with those over {size[0]:,.0f}."
    if len(loss) < 3:
        few = counted(len(loss), "comparable evaluation")
        return f"{few} of the validation loss: too few to tell whether the model overfits.{other}"
    best = int(loss.argmin())
    said = f"The validation loss was lowest at step {step[best]:,.0f}: {loss[best]:.4f}"
    if best == len(loss) - 1:
        return f"{said}, the last of its kind. It did not rise.{other}"
    said += f"; at step {step[-1]:,.0f} it was {loss[-1]:.4f}"
    if loss[-1] > loss[best] * (1 + RISEN):
        note = "; the weights of then are in checkpoints/best" * (run.checkpoint.name == "best")
        return f"{said}. The model has overfitted since step {step[best]:,.0f}{note}.{other}"
    return f"{said}, about the same: no clear sign of overfitting.{other}"


def _elapsed(seconds: float) -> str:
    """Writes a duration as hours, minutes and seconds."""
    return str(timedelta(seconds=round(min(seconds, 1e12))))
