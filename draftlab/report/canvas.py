"""The look of all plots: figures without matplotlib's global state, legends, colours."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers can distinguish; without the pale yellow
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = "osD^vPX"
GREY = "#8C8C8C"
DPI = 160
WIDTH = 7.5
MAX_PANELS = 4


def new_figure(
    title: str, caption: str, *, height: float = 4.2, panels: Sequence[str] = ("",)
) -> Figure:
    """Return a figure 7.5 inches wide with a caption below its axes.

    Args:
        title: title of the figure.
        caption: the conditions of the measurement.
        height: height of a row of panels, in inches.
        panels: title of each panel, two panels in a row; `figure.axes` has the same order.
    """
    columns = min(len(panels), 2)
    lines = textwrap.wrap(plain(caption), 138, break_on_hyphens=False)
    below = 0.15 * len(lines) + 0.1
    total = height * -(-len(panels) // columns) + below
    figure = Figure(figsize=(WIDTH, total), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(rect=(0, below / total, 1, 1 - below / total), w_pad=0.1)
    figure.text(0.012, 0.012, "\n".join(lines), fontsize=6.8, color="#555555", va="bottom")
    shared: Axes | None = None
    for i, panel in enumerate(panels, 1):
        axes = figure.add_subplot(-(-len(panels) // columns), columns, i, sharey=shared)
        shared = shared or axes
        name = f"{title}, {panel}" if panel else title
        name = "\n".join(textwrap.wrap(plain(name), 72 if columns == 1 else 40))
        axes.set_title(name, fontsize=11 if columns == 1 else 9.5, loc="left", fontweight="bold")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="both", color="#E4E4E4", linewidth=0.8)
        axes.set_axisbelow(True)
    return figure


def line_style(number: int, *, dashed: bool) -> dict[str, str]:
    """Return colour, marker and line style of a line."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKERS[number % len(MARKERS)],
        "linestyle": "--" if dashed else "-",
    }


def legend(figure: Figure) -> None:
    """Add one legend for all panels: inside the axes if it is short, else above them."""
    axes = figure.axes[0]
    entries: dict[str, Any] = {}
    for panel in figure.axes:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    options: dict[str, Any] = {"frameon": False, "fontsize": 8.5, "handlelength": 3.0}
    if len(figure.axes) == 1 and len(entries) <= 4:
        axes.legend(entries.values(), entries.keys(), **options)
        return
    columns = max(1, min(3, 100 // max(1, *map(len, entries))))
    _grow(figure, 0.2 * -(-len(entries) // columns))
    figure.legend(
        entries.values(), entries.keys(), loc="outside upper left", ncols=columns, **options
    )


def _grow(figure: Figure, inches: float) -> None:
    """Make the figure higher above the axes, without a change of the caption."""
    width, before = figure.get_size_inches()
    after = before + inches
    engine = figure.get_layout_engine()
    below = engine.get()["rect"][1] * before / after
    figure.set_size_inches(width, after)
    engine.set(rect=(0, below, 1, 1 - below))


def pick_evenly(values: Sequence[Any], count: int = MAX_PANELS) -> list[Any]:
    """Return at most `count` distinct sorted values, with the first and the last one."""
    distinct = sorted(set(values))
    if len(distinct) <= count:
        return distinct
    return [distinct[round(i * (len(distinct) - 1) / (count - 1))] for i in range(count)]


def plain(text: str) -> str:
    """Escape dollar signs, which matplotlib would read as mathematics."""
    return text.replace("$", r"\$")


def error_bars(
    values: Sequence[float], intervals: Sequence[tuple[float, float] | None]
) -> tuple[list[float], list[float]]:
    """Return the lengths of the error bars below and above; NaN (no bar) without an interval."""
    below, above = [], []
    for value, interval in zip(values, intervals, strict=True):
        low, high = interval or (math.nan, math.nan)
        below.append(max(value - low, 0.0))
        above.append(max(high - value, 0.0))
    return below, above


def png(figure: Figure) -> bytes:
    """Return the figure as PNG bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", facecolor="white")
    return buffer.getvalue()
