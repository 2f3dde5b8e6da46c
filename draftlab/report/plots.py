"""Plots of acceptance, and the list of all plots of a report."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from draftlab.evaluate.results import Report, Row
from draftlab.report import formatting as fmt
from draftlab.report.canvas import (
    COLOURS,
    MAX_PANELS,
    error_bars,
    legend,
    line_style,
    new_figure,
    plain,
)
from draftlab.report.conditions import report_conditions, row_labels, row_traits
from draftlab.report.plot_times import speedup_by_batch, tpot, tpot_by_k

MAX_LINES_WITH_CROSSES = 5


def acceptance_by_position(rows: Sequence[Row], caption: str) -> Figure | None:
    """Return a plot of the unconditional acceptance at each draft position.

    It shows only the largest K of a head, whose first positions equal those of smaller values. Each
    head and engine has a panel, each temperature a colour; lines without draft probabilities are
    dashed. If every panel had one line, all lines share a panel. Crosses are expected acceptance.
    The result is None if nothing was drafted.
    """
    drafted = [row for row in rows if row.counters.acceptance_at]
    max_k: dict[tuple[str | None, str], int] = {}
    for row in drafted:
        key = (row.head, row.engine)
        max_k[key] = max(row.k, max_k.get(key, 0))
    shown = [row for row in drafted if row.k == max_k[row.head, row.engine]]
    if not shown:
        return None
    panels: dict[tuple[str, ...], list[Row]] = {}
    for row, traits in zip(shown, row_traits(shown), strict=True):
        panels.setdefault(traits, []).append(row)
    one_panel = all(len(here) == 1 for here in panels.values())
    if one_panel:
        panels = {(): shown[: len(COLOURS)]}
    panels = dict(list(panels.items())[:MAX_PANELS])
    titles = [", ".join(traits) for traits in panels]
    figure = new_figure(
        "Acceptance by draft position",
        caption,
        panels=titles,
        height=4.2 if len(panels) < 2 else 3.4,
    )
    temperatures = sorted({row.temperature for row in shown})
    has_crosses = False
    for axes, here in zip(figure.axes, panels.values(), strict=True):
        for n, (row, label) in enumerate(zip(here, row_labels(here), strict=True)):
            i = n if one_panel else temperatures.index(row.temperature)
            positions = range(1, row.k + 1)
            axes.plot(
                positions,
                row.counters.acceptance_at,
                label=plain(label),
                **line_style(i, dashed=fmt.draft_probs(row) == "off"),
            )
        for row in here if len(here) <= MAX_LINES_WITH_CROSSES else []:
            if row.expected_acceptance is not None:
                axes.plot(
                    range(1, row.k + 1),
                    row.expected_acceptance,
                    "x",
                    color="#222222",
                    markersize=8,
                    label="_" if has_crosses else "expected (self-check)",  # one entry is enough
                )
                has_crosses = True
        axes.set(
            xlabel="draft position",
            ylabel="share accepted up to it",
            ylim=(0, 1.03),
            xticks=range(1, max(row.k for row in here) + 1),
        )
    legend(figure)
    return figure


def acceptance_length(rows: Sequence[Row], caption: str) -> Figure | None:
    """Return a plot of AL by temperature; None for fewer than two temperatures.

    At T = 0 draft probabilities make no difference, so its row belongs to both lines.
    """
    measured = [row for row in rows if row.acceptance_length is not None]
    if len({row.temperature for row in measured}) < 2:
        return None
    lines: dict[tuple[str, ...], list[Row]] = {}
    for row, traits in zip(measured, row_traits(measured), strict=True):
        for probs in ("on", "off") if row.temperature == 0 else (fmt.draft_probs(row),):
            lines.setdefault((f"draft probs {probs}", *traits), []).append(row)
    # a line with T = 0 only would repeat a point of the other line
    lines = {name: line for name, line in lines.items() if any(row.temperature for row in line)}
    settings = list(dict.fromkeys(name[1:] for name in lines))
    figure = new_figure("Acceptance length by temperature", caption)
    axes = figure.axes[0]
    width = 0.012 * max(row.temperature for row in measured)
    for i, (name, unsorted) in enumerate(lines.items()):
        line = sorted(unsorted, key=lambda row: row.temperature)
        shift = (i - (len(lines) - 1) / 2) * width  # draws intervals side by side
        lengths = [row.acceptance_length for row in line]
        # with a single setting the colours distinguish draft probabilities
        style = i if len(settings) == 1 else settings.index(name[1:])
        axes.errorbar(
            [row.temperature + shift for row in line],
            lengths,
            yerr=error_bars(lengths, [row.acceptance_length_ci for row in line]),
            capsize=3,
            label=plain(", ".join(name)),
            **line_style(style, dashed=name[0].endswith("off")),
        )
    axes.set(xlabel="temperature T", ylabel="AL (tokens per verify step)")
    ticks = sorted({row.temperature for row in measured})
    axes.set_xticks(ticks, [fmt.temperature(tick) for tick in ticks])
    axes.set_ylim(bottom=1)  # AL = 1: nothing accepted
    legend(figure)
    return figure


def figures(report: Report) -> dict[str, Figure]:
    """Return the plots that the rows allow, by file name without its suffix."""
    rows = report.rows
    facts = [
        f"target {fmt.target_name(report)}",
        *(f"{name} {value}" for name, value in report_conditions(report).shared.items()),
        f"{' or '.join(map(str, sorted({row.prompts for row in rows})))} prompts",
        *sorted({f"{row.drafter}, K = {row.k}" for row in rows if fmt.has_drafter(row)}),
    ]
    caption = " · ".join(facts)
    plots = {
        "acceptance_length": acceptance_length(rows, caption),
        "acceptance_by_position": acceptance_by_position(rows, caption),
        "tpot_by_k": tpot_by_k(report, caption),
        "speedup_by_batch": speedup_by_batch(rows, caption),
        "tpot": tpot(rows, caption),
    }
    return {name: figure for name, figure in plots.items() if figure is not None}
