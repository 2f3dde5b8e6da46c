"""The look of all plots: figures without matplotlib's global state, legends, colours."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Sequence
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from draftlab.evaluate.calibration.result import Calibration
from draftlab.evaluate.results import Row

# Okabe and Ito's colours, which colour-blind readers can distinguish; without the pale yellow
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = "osD^v"  # its length and that of COLOURS have no common factor: 35 different pairs
GREY = "#8C8C8C"
WIDTH, HEIGHT = 4.8, 3.5
"""Size of a plot in inches: its text is readable at half the width of a page and on a phone."""
LEGEND_LINE = 0.2
LINE, SYMBOL = 69, 9
"""Characters in a line of a legend, and those that an entry's symbol and spaces take."""


def new_figure(
    title: str,
    of: Sequence[Row | Calibration],
    *,
    height: float = HEIGHT,
    grid: tuple[int, int] = (1, 1),
    count: int = 1,
) -> Figure:
    """Return a figure of `count` axes, whose label says of which heads and temperatures it is."""
    figure = Figure(figsize=(WIDTH, height), dpi=200, layout="constrained")
    heads = list(dict.fromkeys(one.head.rpartition("/")[2] for one in of if one.head))
    temperatures = ", ".join(f"{t:g}" for t in sorted({one.temperature for one in of}))
    names = f"Head{'s' * (len(heads) > 1)} {', '.join(heads)}; " if heads else ""
    figure.set_label(f"{names}T = {temperatures}.")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08)
    name = "\n".join(textwrap.wrap(plain(title), 46))
    figure.suptitle(name, fontsize=10, x=0.02, ha="left", fontweight="bold")
    for i in range(1, count + 1):
        axes = figure.add_subplot(*grid, i)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="both", color="#E4E4E4", linewidth=0.8)
        axes.set_axisbelow(True)
    return figure


def line_style(number: int, *, sampled: bool) -> dict[str, Any]:
    """Return colour, marker and line style: argmax drafts are dashed, with hollow markers."""
    colour = COLOURS[number % len(COLOURS)]
    return {
        "color": colour,
        "marker": MARKERS[number % len(MARKERS)],
        "markerfacecolor": colour if sampled else "white",
        "linestyle": "-" if sampled else "--",
    }


def legend(figure: Figure) -> None:
    """Add one legend below all axes; from its third line on the figure becomes higher."""
    entries: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(textwrap.fill(label, LINE - SYMBOL), handle)
    columns = max(1, min(3, LINE // (SYMBOL + max(map(len, entries), default=0))))
    width, height = figure.get_size_inches()
    lines = sum(name.count("\n") + 1 for name in entries)
    figure.set_size_inches(width, height + LEGEND_LINE * max(0, -(-lines // columns) - 2))
    figure.legend(
        entries.values(),
        entries.keys(),
        loc="outside lower left",
        ncols=columns,
        frameon=False,
        fontsize=8.5,
        handlelength=2.2,
    )


def plain(text: str) -> str:
    """Escape dollar signs, which matplotlib would read as mathematics."""
    return text.replace("$", r"\$")


def error_bars(
    values: Sequence[float], intervals: Sequence[tuple[float, float] | None]
) -> tuple[list[float], list[float]]:
    """Return the lengths of the error bars below and above; NaN (no bar) without an interval."""
    ends = [interval or (math.nan, math.nan) for interval in intervals]
    below = [max(value - low, 0.0) for value, (low, _) in zip(values, ends, strict=True)]
    return below, [max(high - value, 0.0) for value, (_, high) in zip(values, ends, strict=True)]


def png(figure: Figure, description: str = "") -> bytes:
    """Return the figure as PNG bytes; the description is text inside of the file."""
    buffer = io.BytesIO()
    metadata = {"Description": description} if description else None
    figure.savefig(buffer, format="png", facecolor="white", metadata=metadata)
    return buffer.getvalue()
