"""Figures of their own (matplotlib's global state stays untouched), and how they look."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart by colour-blind readers too; yellow is too pale on white
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = "osD^vPX"
GREY = "#8C8C8C"
DPI = 160
WIDTH = 7.5
MOST_PANELS = 4


def new_figure(
    title: str, caption: str, *, height: float = 4.2, panels: Sequence[str] = ("",)
) -> Figure:
    """A figure of 7.5 inches, its conditions written below the axes.

    Args:
        title: of the figure.
        caption: the conditions.
        height: in inches, of a row of panels.
        panels: what each panel shows, two in a row; their axes are the figure's, in this order.
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


def legend(figure: Figure) -> None:
    """One legend for all panels: inside the axes where it is short, else above them."""
    axes = figure.axes[0]
    entries: dict[str, Any] = {}
    for one in figure.axes:
        for handle, label in zip(*one.get_legend_handles_labels(), strict=True):
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
    """Adds height for what stands above the axes; the caption keeps its own."""
    width, before = figure.get_size_inches()
    after = before + inches
    engine = figure.get_layout_engine()
    below = engine.get()["rect"][1] * before / after
    figure.set_size_inches(width, after)
    engine.set(rect=(0, below, 1, 1 - below))


def spread(values: Sequence[Any], most: int = MOST_PANELS) -> list[Any]:
    """At most `most` of the distinct sorted values, the first and the last among them."""
    found = sorted(set(values))
    if len(found) <= most:
        return found
    return [found[round(i * (len(found) - 1) / (most - 1))] for i in range(most)]


def plain(text: str) -> str:
    """Keeps matplotlib from reading dollar signs in a name as mathematics."""
    return text.replace("$", r"\$")


def errors(
    value: float, interval: tuple[float, float] | None
) -> tuple[tuple[float], tuple[float]] | None:
    """Lengths of the error bar below and above; None where no interval was measured."""
    if interval is None:
        return None
    return (max(0.0, value - interval[0]),), (max(0.0, interval[1] - value),)


def png(figure: Figure) -> bytes:
    """The figure as PNG bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", facecolor="white")
    return buffer.getvalue()
