"""Curves of runs, as figures of Bokeh, whose script is a part of the page."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from bokeh.embed import components
from bokeh.models import (
    BoxZoomTool,
    CDSView,
    ColumnDataSource,
    CrosshairTool,
    IndexFilter,
    NumeralTickFormatter,
    Range1d,
    Span,
)
from bokeh.plotting import figure
from bokeh.resources import Resources

from fastgpt.report.data import POINTS, Run, thinned

COLOURS = ("#4c8dd6", "#e08a3c", "#3fa67a", "#c46bb5", "#b8963a", "#7c79d8", "#d1605e", "#3fa3b5")
"""Colours of lines, which can be told apart on a light and on a dark page."""
GREY = "#808a96"
LOSSES = {"train_loss": "training, as logged", "smoothed": "training, smoothed",
          "val_loss": "validation"}  # fmt: skip
FIGURES = {"loss": "Loss, nats per token", "lr": "Learning rate", "grad_norm": "Gradient norm",
           "tok_per_s": "Speed, tokens/s", "mfu": "MFU",
           "peak_memory_gib": "Peak memory, GiB"}  # fmt: skip
"""Title of each figure; all but the first show the column of this name."""
TICKS = {"tok_per_s": "0.[0]a", "mfu": "0.[0]%"}


def curves(runs: Sequence[Run]) -> tuple[str, dict[str, tuple[str, str]]]:
    """Returns the scripts that draw the curves, and the titles and elements of the figures.

    Each figure is there twice, with a linear and a logarithmic axis, as `loss` and `loss log`.
    """
    x_range = Range1d(start=0, end=1.01 * max(run.last_step for run in runs))
    crosshair, several = Span(dimension="height", line_color=GREY), len(runs) > 1

    @cache
    def source(number: int, column: str) -> ColumnDataSource:
        """Returns the points of a curve, with its name and its colour."""
        run, said = runs[number], LOSSES.get(column) or FIGURES[column]
        indices = thinned(run.columns[column], 4 * POINTS // max(4, len(runs)))
        data = dict[str, Any](x=run.columns["step"][indices], y=run.columns[column][indices])
        data |= {axis: run.columns[axis][indices] for axis in ("step", "tokens", "seconds")}
        data["best"] = indices == run.best
        colour = COLOURS[(number if several else int(column == "val_loss")) % len(COLOURS)]
        name = f"{run.label}: {said}" if several else said
        return ColumnDataSource(data, name=name, tags=[colour])

    plots = dict[str, Any]()
    for name in FIGURES:
        columns = [*LOSSES][several:] if name == "loss" else [name]
        shown = [(n, x) for n, run in enumerate(runs) for x in columns if len(run.finite(x))]
        for log in (False, True) if shown else ():
            plot = plots[f"{name} log" if log else name] = _figure(name, log)
            plot.x_range = x_range
            plot.add_tools(CrosshairTool(overlay=crosshair, visible=False))
            for number, column in shown:
                _draw(plot, column, source(number, column), dashed=several)
    for plot in (plots[name] for name in ("loss", "loss log") if name in plots):
        plot.add_layout(plot.legend[0], "below")
        plot.legend.update(click_policy="hide", background_fill_alpha=0, border_line_alpha=0,
                           label_text_color=GREY, orientation="horizontal")  # fmt: skip
    # it escapes what a run may be called
    script, elements = components(plots, wrap_script=False) if plots else ("", {})
    titles = FIGURES | {"lr": _rates(runs)}
    titled = {key: (titles[key.split()[0]], element) for key, element in elements.items()}
    library = Resources(mode="inline", components=["bokeh"]).render_js()
    return f"{library}<script>{script}</script>", titled


def _rates(runs: Sequence[Run]) -> str:
    """Returns the title of the learning rates, of which only AdamW's is logged."""
    rates = [run.config.optim for run in runs if run.config.optim.kind == "muon"]
    ratios = {x.muon_lr / x.lr for x in rates}
    said = ", ".join(f"{ratio:.3g}" for ratio in sorted(ratios))
    return f"{FIGURES['lr']} of AdamW (Muon's: {said} times it)" if said else FIGURES["lr"]


def _figure(name: str, log: bool) -> figure:
    plot = figure(
        height=380 if name == "loss" else 200, sizing_mode="stretch_width", min_border_left=64,
        x_axis_label="step", y_axis_type="log" if log else "linear", toolbar_location="above",
        tools="pan,wheel_zoom,reset,save", active_scroll=None,
    )  # fmt: skip
    plot.add_tools(zoom := BoxZoomTool(dimensions="width"))
    plot.toolbar.active_drag = zoom
    plot.toolbar.update(logo=None, autohide=True)
    plot.xaxis.formatter = NumeralTickFormatter(format="0.[00]a")
    plot.yaxis.formatter = NumeralTickFormatter(format=TICKS.get(name, "0.[00000]"))
    plot.xgrid.visible = False
    return plot


def _draw(plot: figure, column: str, source: ColumnDataSource, *, dashed: bool) -> None:
    faint, evaluated = column == "train_loss", column == "val_loss"
    style = {"source": source, "color": source.tags[0]}
    if column in LOSSES:
        style["legend_label"] = source.name
    plot.line("x", "y", line_width=1 if faint else 2, alpha=0.45 if faint else 1,
              line_dash="dashed" if evaluated and dashed else "solid", **style)  # fmt: skip
    if evaluated:  # the lowest one has a ring
        lowest = CDSView(filter=IndexFilter(indices=np.flatnonzero(source.data["best"]).tolist()))
        plot.scatter("x", "y", size=13, fill_alpha=0, line_width=2, view=lowest, **style)
    if evaluated or len(source.data["y"]) == 1:
        plot.scatter("x", "y", size=6, **style)
