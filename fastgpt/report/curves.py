"""Curves of runs, as figures of Bokeh, whose script is a part of the page."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
from bokeh.embed import components
from bokeh.models import ColumnDataSource, DataRange1d, NumeralTickFormatter
from bokeh.palettes import Category10_10
from bokeh.plotting import figure
from bokeh.resources import Resources

from fastgpt.report.data import Columns, Run

GREY = "#808a96"
AXES = "step", "tokens", "minutes"
LOSSES = {"train_loss": "training, as logged", "smoothed": "training, smoothed",
          "val_loss": "validation"}  # fmt: skip
FIGURES = {"loss": "Loss, nats per token", "lr": "Learning rate", "muon_lr": "Muon's learning rate",
           "grad_norm": "Gradient norm", "tok_per_s": "Speed, tokens/s", "mfu": "MFU",
           "peak_memory_gib": "Peak memory, GiB"}  # fmt: skip
"""Title of each figure; all but the first show the column of this name."""
TICKS = {"tok_per_s": "0.[0]a", "mfu": "0.[0]%"}


def curves(runs: Sequence[Run]) -> tuple[str, dict[str, tuple[str, str]]]:
    """Returns the scripts that draw the curves, and the titles and elements of the figures.

    Each figure is there twice, with a linear and a logarithmic axis, as `loss` and `loss log`.
    """
    x_range, several, plots = DataRange1d(start=0), len(runs) > 1, dict[str, Any]()
    sources = [_source(run, columns) for run in runs for columns in (run.trained, run.evaluated)]
    for name, log in product(FIGURES, (False, True)):
        plot = _figure(name, log, x_range)
        for column in [*LOSSES][several:] if name == "loss" else [name]:
            evaluated = column == "val_loss"
            for number, run in enumerate(runs):
                source = sources[2 * number + evaluated]
                label = LOSSES.get(column) or FIGURES[column]
                label = f"{run.label}: {label}" if several else label
                colour = Category10_10[(number if several else int(evaluated)) % 10]
                if column in source.column_names:
                    _draw(plot, column, source, label, colour, dashed=several)
        if plot.renderers:
            plots[f"{name} log" if log else name] = plot
        if name == "loss" and plot.renderers:
            plot.add_layout(plot.legend[0], "below")
            plot.legend.update(click_policy="hide", background_fill_alpha=0, border_line_alpha=0,
                               label_text_color=GREY, orientation="horizontal")  # fmt: skip
    # it escapes what a run may be called
    script, elements = components(plots, wrap_script=False) if plots else ("", {})
    titled = {key: (FIGURES[key.split()[0]], element) for key, element in elements.items()}
    library = Resources(mode="inline", components=["bokeh"]).render_js()
    return f"{library}<script>{script}</script>", titled


def _source(run: Run, columns: Columns) -> ColumnDataSource:
    """Returns the figures of a run for curves over the steps, with the sizes of points."""
    data: dict[str, Any] = {k: x for k, x in columns.items() if np.isfinite(x).any()}
    sizes = np.where(np.arange(len(columns["step"])) == run.best, 14, 6)
    return ColumnDataSource(data | {"x": columns["step"], "size": sizes})


def _figure(name: str, log: bool, x_range: DataRange1d) -> figure:
    plot = figure(
        height=380 if name == "loss" else 200, sizing_mode="stretch_width", min_border_left=64,
        x_axis_label="step", y_axis_type="log" if log else "linear", toolbar_location="above",
        x_range=x_range, window_axis="x",  # the y axis fits what is seen
        tools="xbox_zoom,pan,xwheel_zoom,crosshair,reset,save", active_scroll=None,
    )  # fmt: skip
    plot.toolbar.update(logo=None, autohide=True)
    plot.xaxis.formatter = NumeralTickFormatter(format="0.[000]a")
    plot.yaxis.formatter = NumeralTickFormatter(format=TICKS.get(name, "0.[00000]"))
    return plot


def _draw(
    plot: figure, column: str, source: ColumnDataSource, label: str, colour: str, *, dashed: bool
) -> None:
    faint, evaluated = column == "train_loss", column == "val_loss"
    style = {"source": source, "color": colour, "name": label, "tags": [column]}
    if column in LOSSES:
        style["legend_label"] = label
    plot.line("x", column, line_width=1 if faint else 2, alpha=0.45 if faint else 1,
              line_dash="dashed" if evaluated and dashed else "solid", **style)  # fmt: skip
    if evaluated or len(source.data["x"]) == 1:
        plot.scatter("x", column, size="size" if evaluated else 6, **style)
