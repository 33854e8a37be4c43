"""Curves of runs, as figures of Bokeh, whose script is a part of the page."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from bokeh.embed import components
from bokeh.models import ColumnDataSource, DataRange1d, NumeralTickFormatter
from bokeh.palettes import Category10_10
from bokeh.plotting import figure
from bokeh.resources import Resources

from fastgpt.report.data import POINTS, Run, thinned

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
    for name in FIGURES:
        columns = [*LOSSES][several:] if name == "loss" else [name]
        found = [(n, x) for n, run in enumerate(runs) for x in columns if len(run.finite(x))]
        sources = [(x, _source(runs, n, x)) for n, x in found]
        for log in (False, True) if sources else ():
            plot = plots[f"{name} log" if log else name] = _figure(name, log, x_range)
            for column, source in sources:
                _draw(plot, column, source, dashed=several)
            if name == "loss":
                plot.add_layout(plot.legend[0], "below")
                plot.legend.update(click_policy="hide", background_fill_alpha=0,
                                   border_line_alpha=0, label_text_color=GREY,
                                   orientation="horizontal")  # fmt: skip
    # it escapes what a run may be called
    script, elements = components(plots, wrap_script=False) if plots else ("", {})
    titled = {key: (FIGURES[key.split()[0]], element) for key, element in elements.items()}
    library = Resources(mode="inline", components=["bokeh"]).render_js()
    return f"{library}<script>{script}</script>", titled


def _source(runs: Sequence[Run], number: int, column: str) -> ColumnDataSource:
    """Returns the points of a curve over the steps, with its name and its colour."""
    run, name, several = runs[number], LOSSES.get(column) or FIGURES[column], len(runs) > 1
    places = thinned(run.columns[column], 4 * POINTS // max(4, len(runs)))
    data: dict[str, Any] = {axis: run.columns[axis][places] for axis in AXES}
    data |= {"x": data["step"], "y": run.columns[column][places]}
    data["size"] = np.where(places == run.best, 14, 6)
    colour = Category10_10[(number if several else int(column == "val_loss")) % 10]
    return ColumnDataSource(data, name=f"{run.label}: {name}" if several else name, tags=[colour])


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


def _draw(plot: figure, column: str, source: ColumnDataSource, *, dashed: bool) -> None:
    faint, evaluated = column == "train_loss", column == "val_loss"
    style = {"source": source, "color": source.tags[0]}
    if column in LOSSES:
        style["legend_label"] = source.name
    plot.line("x", "y", line_width=1 if faint else 2, alpha=0.45 if faint else 1,
              line_dash="dashed" if evaluated and dashed else "solid", **style)  # fmt: skip
    if evaluated or len(source.data["y"]) == 1:
        plot.scatter("x", "y", size="size" if evaluated else 6, **style)
