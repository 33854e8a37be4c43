"""Curves of runs, as figures of Bokeh, whose script is a part of the page."""

from collections.abc import Sequence
from functools import cache

import numpy as np
from bokeh.embed import components
from bokeh.models import (
    BoxZoomTool, ColumnDataSource, CrosshairTool, NumeralTickFormatter, PanTool,
    Range1d, ResetTool, SaveTool, Span, WheelZoomTool,
)  # fmt: skip
from bokeh.plotting import figure
from bokeh.resources import Resources

from fastgpt.logs.metrics import interesting_range
from fastgpt.report.data import Run, thinned

COLOURS = ("#4c8dd6", "#e08a3c", "#3fa67a", "#c46bb5", "#b8963a", "#7c79d8", "#d1605e", "#3fa3b5")
"""Colours of lines, which can be told apart on a light and on a dark page."""
GREY = "#808a96"
LOSSES = {"train_loss": "training, as logged", "smoothed": "training, smoothed",
          "val_loss": "validation"}  # fmt: skip
FIGURES = {
    "loss": "Loss, nats per token",
    "lr": "Learning rate",
    "grad_norm": "Gradient norm",
    "tok_per_s": "Speed, tokens/s",
    "mfu": "MFU",
    "peak_memory_gib": "Peak memory, GiB",
}
"""Title of each figure; all but the first show the column of this name."""
TICKS = {"tok_per_s": "0.[0]a", "mfu": "0.[0]%"}


def curves(runs: Sequence[Run]) -> tuple[str, dict[str, tuple[str, str]]]:
    """Returns the scripts that draw the curves, and the titles and elements of the figures.

    Each figure is there twice, with a linear and a logarithmic axis, as `loss` and `loss log`.
    """
    last = max(run.last_step for run in runs)
    x_range, crosshair = Range1d(0, 1.01 * last), Span(dimension="height", line_color=GREY)

    @cache
    def source(number: int, column: str) -> ColumnDataSource:
        label = runs[number].label if len(runs) > 1 else ""
        evaluated, columns = column == "val_loss", runs[number].columns
        name = ": ".join(filter(None, [label, LOSSES.get(column) or FIGURES[column]]))
        colour = COLOURS[(number if label else int(evaluated)) % len(COLOURS)]
        kept = thinned(columns[column])
        axes = {axis: columns[axis][kept] for axis in ("step", "tokens", "seconds")}
        data = {**axes, "x": axes["step"], "y": columns[column][kept]}
        return ColumnDataSource(data, name=name, tags=[colour])

    plots = dict[str, figure]()
    for name in FIGURES:
        shown = [(number, column) for number, run in enumerate(runs)
                 for column in (LOSSES if name == "loss" else (name,)) if len(run.finite(column))]
        for scale in ("linear", "log") if shown else ():
            plot = _figure(name, scale, x_range, crosshair)
            for number, column in shown:
                dashed = column == "val_loss" and len(runs) > 1
                _draw(plot, column, source(number, column), dashed)
            if name == "loss":
                plot.legend.update(click_policy="hide", background_fill_alpha=0,
                                   border_line_alpha=0, label_text_color=GREY)
            plots[f"{name} log" if scale == "log" else name] = plot
    if "loss" in plots:
        both = [np.stack([r.columns[x] for x in ("train_loss", "val_loss")], 1) for r in runs]
        lows, highs = zip(*(interesting_range(x.ravel().tolist()) for x in both))
        if min(lows) < max(highs):
            plots["loss"].y_range = Range1d(min(lows), max(highs))
    script, elements = components(plots, wrap_script=False) if plots else ("", {})
    titled = {key: (FIGURES[key.split()[0]], element) for key, element in elements.items()}
    library = Resources(mode="inline", components=["bokeh"]).render_js()
    script = script.replace("</", r"<\/")  # a run may be called anything, also </script>
    return f"{library}<script>{script}</script>", titled


def _figure(name: str, scale: str, x_range: Range1d, crosshair: Span) -> figure:
    drag = BoxZoomTool()
    plot = figure(
        height=380 if name == "loss" else 200, sizing_mode="stretch_width", x_range=x_range,
        y_axis_type=scale, x_axis_label="step", min_border_left=64, active_drag=drag,
        tools=[drag, PanTool(), WheelZoomTool(), ResetTool(), SaveTool()], active_scroll=None,
        toolbar_location="above",
    )  # fmt: skip
    plot.add_tools(CrosshairTool(overlay=crosshair, visible=False))
    plot.toolbar.update(logo=None, autohide=True)
    plot.xaxis.formatter = NumeralTickFormatter(format="0.[00]a")
    plot.yaxis.formatter = NumeralTickFormatter(format=TICKS.get(name, "0.[00000]"))
    plot.xgrid.visible = False
    return plot


def _draw(plot: figure, column: str, source: ColumnDataSource, dashed: bool) -> None:
    faint, dots = column == "train_loss", column == "val_loss" or len(source.data["y"]) == 1
    style = {"source": source, "color": source.tags[0]}
    if column in LOSSES:
        style["legend_label"] = source.name
    plot.line("x", "y", line_width=1 if faint else 2, alpha=0.45 if faint else 1,
              line_dash="dashed" if dashed else "solid", **style)  # fmt: skip
    if dots:
        plot.scatter("x", "y", size=6, **style)
