"""The plots of a report as sections; each is drawn if the rows allow it.

Figures have no part of matplotlib's global state.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from draftlab.evaluate.calibration.result import Calibration
from draftlab.evaluate.results import Report, Row
from draftlab.report import formatting as fmt
from draftlab.report.conditions import row_traits
from draftlab.report.section import Plot, Section
from draftlab.report.sections import calibration_name

FEWEST = 20
"""Steps of a bin that is drawn: the share of fewer is mostly noise."""
Series = list[tuple[Row, str, dict[str, Any]]]
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


def series(rows: Sequence[Row], *, with_k: bool = True) -> Series:
    """Return each row with its name in a legend and its style; rows of one name have one style."""
    names = [
        plain(", ".join(traits) or row.head or "unnamed")
        for row, traits in zip(rows, row_traits(rows, with_k=with_k), strict=True)
    ]
    order = list(dict.fromkeys(names))
    return [
        (row, name, line_style(order.index(name), sampled=fmt.drafting(row) == "sampled"))
        for name, row in zip(names, rows, strict=True)
    ]


def by_temperature(entries: Series) -> Iterator[tuple[float, Series]]:
    """Yield the rows of each temperature."""
    for temperature in sorted({row.temperature for row, *_ in entries}):
        yield temperature, [one for one in entries if one[0].temperature == temperature]


def acceptance_by_position(report: Report) -> Iterator[Figure]:
    """Yield a plot of the unconditional acceptance at each draft position for each temperature.

    It has only each head's largest K, whose first positions equal those of smaller values.
    """
    drafted = [row for row in report.rows if row.counters.acceptance_at]
    largest: dict[tuple[str | None, str], int] = {}
    for row in drafted:
        largest[row.head, row.engine] = max(row.k, largest.get((row.head, row.engine), 0))
    shown = [row for row in drafted if row.k == largest[row.head, row.engine]]
    for temperature, here in by_temperature(series(shown, with_k=False)):
        title = f"Acceptance by draft position, T = {temperature:g}"
        figure = new_figure(title, [row for row, *_ in here])
        axes = figure.axes[0]
        for row, name, style in here:
            axes.plot(range(1, row.k + 1), row.counters.acceptance_at, label=name, **style)
        axes.set(
            xlabel="draft position i",
            ylabel="share of drafts accepted up to i",
            ylim=(0, 1.03),
            xticks=range(1, max(row.k for row, *_ in here) + 1),
        )
        yield figure


def tpot_by_k(report: Report) -> Iterator[Figure]:
    """Yield a plot of TPOT by K at the first timed batch for each temperature.

    Points are measured, lines are the adviser's predictions. Nothing is yielded without advice.
    """
    advice = (report.adviser or {}).get("advice", [])
    rows = [row for row in report.rows if fmt.has_drafter(row) and row.timings]
    if not advice or not rows:
        return
    batch = rows[0].timings[0].batch
    advice = [one for one in advice if one["batch"] == batch]
    timings = [timing for row in report.rows for timing in row.timings[:1]]
    top = max(max(timing.tpot_ms_ci or [timing.tpot_ms]) for timing in timings)
    top = max([top, *(p["tpot_ms"] for one in advice for p in one["predictions"])])
    for temperature, here in by_temperature(series(rows, with_k=False)):
        where = f"T = {temperature:g}, batch {batch}"
        figure = new_figure(f"Time per output token by K, {where}", [row for row, *_ in here])
        axes, names = figure.axes[0], list(dict.fromkeys(name for _, name, _ in here))
        for row, name, style in here:
            timing = row.timings[0]
            shift = (names.index(name) - (len(names) - 1) / 2) * 0.08  # side by side
            bars = error_bars([timing.tpot_ms], [timing.tpot_ms_ci])
            point = style | {"linestyle": "none"}
            axes.errorbar([row.k + shift], [timing.tpot_ms], yerr=bars, capsize=3, **point)
        for name, (row, style) in {name: (row, style) for row, name, style in here}.items():
            axes.plot([], [], label=name, **style)
            for one in (one for one in advice if fmt.belongs_to(one, row)):
                ks, times = zip(*((p["k"], p["tpot_ms"]) for p in one["predictions"]), strict=True)
                axes.plot(ks, times, **style | {"marker": ""})
        for base in sorted({row.timings[0].baseline_tpot_ms or 0.0 for row, *_ in here} - {0.0}):
            axes.axhline(base, color=GREY, linewidth=1.5, label="no drafting")
        axes.set(xlabel="K (drafts a step)", ylabel="TPOT in ms")
        axes.locator_params(axis="x", integer=True)
        max_k = max(row.k for row, *_ in here)
        axes.set(xlim=(0.7, max_k + 0.3), ylim=(0, 1.05 * top))  # one scale for all temperatures
        yield figure


def speedup_by_batch(report: Report) -> Iterator[Figure]:
    """Yield a plot of the speed-up by batch size for each temperature.

    Nothing is yielded if no row was timed at two batch sizes.
    """
    shown = [row for row in report.rows if len([t for t in row.timings if t.speedup]) > 1]
    batches = sorted({timing.batch for row in shown for timing in row.timings})
    tops = [(t.speedup_ci or (0, t.speedup or 0))[1] for row in shown for t in row.timings]
    for temperature, here in by_temperature(series(shown)):
        title = f"Speed-up by batch, T = {temperature:g}"
        figure = new_figure(title, [row for row, *_ in here])
        axes = figure.axes[0]
        for i, (row, name, style) in enumerate(here):
            timed = [timing for timing in row.timings if timing.speedup is not None]
            shift = (i - (len(here) - 1) / 2) * 0.4 / len(here)  # draws intervals side by side
            places = [batches.index(one.batch) + shift for one in timed]
            speedups = [one.speedup for one in timed]
            bars = error_bars(speedups, [one.speedup_ci for one in timed])
            axes.errorbar(places, speedups, yerr=bars, capsize=3, label=name, **style)
        axes.axhline(1, color=GREY, linewidth=1.5)
        axes.set_xticks(range(len(batches)), [str(batch) for batch in batches])
        axes.set(xlabel="prompts decoded at once", ylabel="speed-up (×)")
        axes.set_ylim(0, 1.05 * max(1, *tops))  # the same for all temperatures
        yield figure


def reliability(report: Report) -> Iterator[Figure]:
    """Yield a figure for each calibration, with a diagram for each position.

    On the diagonal the share of steps whose first k drafts were accepted equals the prediction.
    Bins of fewer than `FEWEST` steps are left out.
    """
    for one in report.calibrations:
        columns = min(one.k, 2 if one.k == 4 else 3)
        lines = -(-one.k // columns)
        figure = new_figure(
            f"Reliability, {calibration_name(report, one)}",
            [one],
            height=0.75 + lines * (WIDTH / columns + 0.05),
            grid=(lines, columns),
            count=one.k,
        )
        for k, (axes, position) in enumerate(zip(figure.axes, one.positions, strict=True), 1):
            axes.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle=":")
            curves = (("raw confidence", position.before, 1), ("calibrated", position.after, 0))
            for label, bins, i in curves:
                drawn = [(b.predicted, b.observed) for b in bins if b.count >= FEWEST]
                style = line_style(i, sampled=i == 0) | {"color": COLOURS[i], "markersize": 3.5}
                xs, ys = zip(*drawn, strict=True) if drawn else ((), ())
                axes.plot(xs, ys, label=label, linewidth=1.2, clip_on=False, **style)
            axes.set_title(f"first {k} accepted" if k > 1 else "first draft accepted", fontsize=8)
            axes.set(xlim=(0, 1), ylim=(0, 1), xticks=(0, 0.5, 1), yticks=(0, 0.5, 1))
            axes.set_aspect("equal")
            axes.tick_params(labelsize=7)
            if k > one.k - columns:
                axes.set_xlabel("predicted", fontsize=8)
            if k % columns == 1 or columns == 1:
                axes.set_ylabel("observed", fontsize=8)
        yield figure


PLOTS = {
    "acceptance_by_position": (
        acceptance_by_position,
        "Share of drafts whose first i tokens are all accepted, at the largest K.",
    ),
    "tpot_by_k": (
        tpot_by_k,
        "Points: measured, with 95 % intervals over prompts. Lines: the adviser's prediction. "
        "Grey: without drafting.",
    ),
    "speedup_by_batch": (
        speedup_by_batch,
        "Against decoding without drafts, by the number of prompts decoded at once, with 95 % "
        "intervals over prompts. Below 1 drafting costs time.",
    ),
    "reliability": (
        reliability,
        "Confidence that the first k drafts of a step are accepted, against the share of steps in "
        "which they were, on prompts that the calibration was not fitted on. On the dotted line "
        f"both are equal. Bins of fewer than {FEWEST} steps are left out.",
    ),
}
"""What draws the figures of a name, and the text below them."""


def plots(report: Report) -> list[Section]:
    """Return a section for each figure."""
    found = []
    for name, (draw, text) in PLOTS.items():
        figures = list(draw(report))
        for i, figure in enumerate(figures, 1):
            legend(figure)
            file = name if len(figures) == 1 else f"{name}_{i}"
            texts = [f"{text} {figure.get_label()}"]
            found.append(Section(file.replace("_", " "), texts, figure=Plot(file, figure)))
    return found
