"""The report's plots, as figures of their own (matplotlib's global state stays untouched)."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from draftlab.report import wording
from draftlab.results import Report, Row

# Okabe and Ito's colours, told apart by colour-blind readers too; yellow is too pale on white
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = "osD^vPX"
GREY = "#8C8C8C"
DPI = 160


def _figure(title: str, caption: str, height: float = 4.2) -> Figure:
    """A figure of 7.5 inches with a title, and its conditions written below the axes."""
    lines = textwrap.wrap(_plain(caption), 138, break_on_hyphens=False)
    height += 0.15 * len(lines) + 0.1
    below = (0.15 * len(lines) + 0.1) / height
    figure = Figure(figsize=(7.5, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(rect=(0, below, 1, 1 - below), w_pad=0.1)
    figure.text(0.012, 0.012, "\n".join(lines), fontsize=6.8, color="#555555", va="bottom")
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=11, loc="left", fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="both", color="#E4E4E4", linewidth=0.8)
    axes.set_axisbelow(True)
    return figure


def _plain(text: str) -> str:
    """Keeps matplotlib from reading dollar signs in a name as mathematics."""
    return text.replace("$", r"\$")


def _errors(
    value: float, interval: tuple[float, float] | None
) -> tuple[tuple[float], tuple[float]] | None:
    """Lengths of the error bar below and above; None where no interval was measured."""
    if interval is None:
        return None
    return (max(0.0, value - interval[0]),), (max(0.0, interval[1] - value),)


def acceptance_by_position(rows: Sequence[Row], caption: str) -> Figure | None:
    """Unconditional acceptance at each draft position; dashed without draft probabilities.

    Crosses mark the expected acceptance where it was measured. None when nothing was drafted.
    """
    shown = [
        (row, label)
        for row, label in zip(rows, wording.labels(rows), strict=True)
        if row.counters.acceptance_at
    ]
    if not shown:
        return None
    figure = _figure("Acceptance by draft position", caption)
    axes = figure.axes[0]
    for i, (row, label) in enumerate(shown):
        positions = range(1, row.k + 1)
        colour = COLOURS[i % len(COLOURS)]
        axes.plot(
            positions,
            row.counters.acceptance_at,
            color=colour,
            marker=MARKERS[i % len(MARKERS)],
            linestyle="--" if wording.draft_probs(row) == "off" else "-",
            label=_plain(label),
        )
    expected = [row for row, _ in shown if row.expected_acceptance is not None]
    for i, row in enumerate(expected):
        axes.plot(
            range(1, row.k + 1),
            row.expected_acceptance,
            "x",
            color="#222222",
            markersize=8,
            label="_" if i else "expected (self-check)",  # one entry in the legend is enough
        )
    axes.set(
        xlabel="draft position",
        ylabel="share of drafts accepted up to it",
        ylim=(0, 1.03),
        xticks=range(1, max(row.k for row, _ in shown) + 1),
    )
    axes.legend(frameon=False, fontsize=8.5)
    return figure


def acceptance_length(rows: Sequence[Row], caption: str) -> Figure | None:
    """AL by temperature with 95 % intervals; None below two temperatures.

    At T = 0 draft probabilities play no part, so its row belongs to the line with and without.
    """
    measured = [row for row in rows if row.acceptance_length is not None]
    if len({row.temperature for row in measured}) < 2:
        return None
    lines: dict[tuple[str, ...], list[Row]] = {}
    for row, traits in zip(measured, wording.traits(measured), strict=True):
        for probs in ("on", "off") if row.temperature == 0 else (wording.draft_probs(row),):
            lines.setdefault((f"draft probs {probs}", *traits), []).append(row)
    # a line of T = 0 alone would only repeat a point of its sister line
    lines = {name: line for name, line in lines.items() if any(row.temperature for row in line)}
    figure = _figure("Acceptance length by temperature", caption)
    axes = figure.axes[0]
    width = 0.012 * max(row.temperature for row in measured)
    for i, (name, unsorted) in enumerate(lines.items()):
        line = sorted(unsorted, key=lambda row: row.temperature)
        shift = (i - (len(lines) - 1) / 2) * width  # intervals side by side, not on each other
        values = [row.acceptance_length for row in line]
        spans = [
            _errors(row.acceptance_length, row.acceptance_length_ci) or ((0.0,), (0.0,))
            for row in line
        ]
        axes.errorbar(
            [row.temperature + shift for row in line],
            values,
            yerr=[[span[side][0] for span in spans] for side in (0, 1)],
            color=COLOURS[i % len(COLOURS)],
            marker=MARKERS[i % len(MARKERS)],
            linestyle="--" if name[0].endswith("off") else "-",
            capsize=3,
            label=_plain(", ".join(name)),
        )
    axes.set(
        xlabel="temperature T",
        ylabel="AL (tokens per verify step)",
    )
    ticks = sorted({row.temperature for row in measured})
    axes.set_xticks(ticks, [wording.temperature(tick) for tick in ticks])
    axes.set_ylim(bottom=1)  # AL = 1: nothing accepted
    axes.legend(frameon=False, fontsize=8.5)
    return figure


def tpot(rows: Sequence[Row], caption: str) -> Figure | None:
    """TPOT of every row with its interval, rows without drafting in grey; None where not timed."""
    shown = [
        (row, label)
        for row, label in zip(rows, wording.labels(rows), strict=True)
        if row.tpot_ms is not None
    ]
    if not shown:
        return None
    figure = _figure("Time per output token", caption, height=1.3 + 0.42 * len(shown))
    axes = figure.axes[0]
    for i, (row, _) in enumerate(shown):
        axes.barh(
            i,
            row.tpot_ms,
            height=0.62,
            color=COLOURS[0] if wording.drafted(row) else GREY,
            xerr=_errors(row.tpot_ms, row.tpot_ms_ci),
            capsize=3,
            ecolor="#222222",
        )
        right = max(row.tpot_ms, row.tpot_ms_ci[1] if row.tpot_ms_ci else 0.0)
        speedup = f"  ({wording.times(row.speedup)})" if row.speedup is not None else ""
        text = f"  {wording.milliseconds(row.tpot_ms)}{speedup}"
        axes.text(right, i, text, va="center", fontsize=8.5)
    names = [textwrap.fill(_plain(label), 36, break_on_hyphens=False) for _, label in shown]
    axes.set_yticks(range(len(shown)), names, fontsize=8.5)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.22)
    axes.set_xlim(left=0)
    axes.set_xlabel("TPOT in ms (in brackets: speed-up)")
    return figure


def figures(report: Report) -> dict[str, Figure]:
    """The plots that the report's rows allow, by file name without its ending."""
    rows = report.rows
    facts = [
        f"target {wording.target_name(report)}",
        *(f"{name} {value}" for name, value in wording.report_conditions(report).shared.items()),
        f"{' or '.join(map(str, sorted({row.prompts for row in rows})))} prompts",
        *sorted({f"{row.drafter}, K = {row.k}" for row in rows if wording.drafted(row)}),
    ]
    caption = " · ".join(facts)
    made = {
        "acceptance_by_position": acceptance_by_position(rows, caption),
        "acceptance_length": acceptance_length(rows, caption),
        "tpot": tpot(rows, caption),
    }
    return {name: figure for name, figure in made.items() if figure is not None}


def png(figure: Figure) -> bytes:
    """The figure as PNG bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", facecolor="white")
    return buffer.getvalue()
