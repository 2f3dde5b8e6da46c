"""The report's plots of acceptance, and which plots a report has."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from draftlab.evaluate.results import Report, Row
from draftlab.report import formatting as wording
from draftlab.report.canvas import (
    COLOURS,
    GREY,
    MARKERS,
    MOST_PANELS,
    errors,
    legend,
    new_figure,
    plain,
    png,
)
from draftlab.report.conditions import report_conditions, row_labels, row_traits
from draftlab.report.plot_times import speedup_by_batch, tpot, tpot_by_k

MOST_CROSSED = 5  # lines that crosses do not hide

__all__ = [
    "GREY",
    "acceptance_by_position",
    "acceptance_length",
    "figures",
    "png",
    "speedup_by_batch",
    "tpot",
    "tpot_by_k",
]


def acceptance_by_position(rows: Sequence[Row], caption: str) -> Figure | None:
    """Unconditional acceptance at each draft position; dashed without draft probabilities.

    A head's largest K alone, since its first positions are those of the smaller ones; a panel for
    each head and engine, a colour for each temperature. Where each has one line, all share a
    panel. Crosses mark the expected acceptance where it was measured. None: nothing was drafted.
    """
    drafted = [row for row in rows if row.counters.acceptance_at]
    deepest: dict[tuple[str | None, str], int] = {}
    for row in drafted:
        key = (row.head, row.engine)
        deepest[key] = max(row.k, deepest.get(key, 0))
    shown = [row for row in drafted if row.k == deepest[row.head, row.engine]]
    if not shown:
        return None
    panels: dict[tuple[str, ...], list[Row]] = {}
    for row, traits in zip(shown, row_traits(shown), strict=True):
        panels.setdefault(traits, []).append(row)
    alone = all(len(here) == 1 for here in panels.values())
    if alone:
        panels = {(): shown[: len(COLOURS)]}
    panels = dict(list(panels.items())[:MOST_PANELS])
    titles = [", ".join(traits) for traits in panels]
    figure = new_figure(
        "Acceptance by draft position",
        caption,
        panels=titles,
        height=4.2 if len(panels) < 2 else 3.4,
    )
    temperatures = sorted({row.temperature for row in shown})
    crosses = False
    for axes, here in zip(figure.axes, panels.values(), strict=True):
        for n, (row, label) in enumerate(zip(here, row_labels(here), strict=True)):
            i = n if alone else temperatures.index(row.temperature)
            positions = range(1, row.k + 1)
            axes.plot(
                positions,
                row.counters.acceptance_at,
                color=COLOURS[i % len(COLOURS)],
                marker=MARKERS[i % len(MARKERS)],
                linestyle="--" if wording.draft_probs(row) == "off" else "-",
                label=plain(label),
            )
        for row in here if len(here) <= MOST_CROSSED else []:
            if row.expected_acceptance is not None:
                axes.plot(
                    range(1, row.k + 1),
                    row.expected_acceptance,
                    "x",
                    color="#222222",
                    markersize=8,
                    label="_" if crosses else "expected (self-check)",  # one entry is enough
                )
                crosses = True
        axes.set(
            xlabel="draft position",
            ylabel="share accepted up to it",
            ylim=(0, 1.03),
            xticks=range(1, max(row.k for row in here) + 1),
        )
    legend(figure)
    return figure


def acceptance_length(rows: Sequence[Row], caption: str) -> Figure | None:
    """AL by temperature with 95 % intervals; None below two temperatures.

    At T = 0 draft probabilities play no part, so its row belongs to the line with and without.
    """
    measured = [row for row in rows if row.acceptance_length is not None]
    if len({row.temperature for row in measured}) < 2:
        return None
    lines: dict[tuple[str, ...], list[Row]] = {}
    for row, traits in zip(measured, row_traits(measured), strict=True):
        for probs in ("on", "off") if row.temperature == 0 else (wording.draft_probs(row),):
            lines.setdefault((f"draft probs {probs}", *traits), []).append(row)
    # a line of T = 0 alone would only repeat a point of its sister line
    lines = {name: line for name, line in lines.items() if any(row.temperature for row in line)}
    settings = list(dict.fromkeys(name[1:] for name in lines))
    figure = new_figure("Acceptance length by temperature", caption)
    axes = figure.axes[0]
    width = 0.012 * max(row.temperature for row in measured)
    for i, (name, unsorted) in enumerate(lines.items()):
        line = sorted(unsorted, key=lambda row: row.temperature)
        shift = (i - (len(lines) - 1) / 2) * width  # intervals side by side, not on each other
        spans = [
            errors(row.acceptance_length, row.acceptance_length_ci) or ((0.0,), (0.0,))
            for row in line
        ]
        # with one setting the colour tells draft probabilities too
        style = i if len(settings) == 1 else settings.index(name[1:])
        axes.errorbar(
            [row.temperature + shift for row in line],
            [row.acceptance_length for row in line],
            yerr=[[span[side][0] for span in spans] for side in (0, 1)],
            color=COLOURS[style % len(COLOURS)],
            marker=MARKERS[style % len(MARKERS)],
            linestyle="--" if name[0].endswith("off") else "-",
            capsize=3,
            label=plain(", ".join(name)),
        )
    axes.set(xlabel="temperature T", ylabel="AL (tokens per verify step)")
    ticks = sorted({row.temperature for row in measured})
    axes.set_xticks(ticks, [wording.temperature(tick) for tick in ticks])
    axes.set_ylim(bottom=1)  # AL = 1: nothing accepted
    legend(figure)
    return figure


def figures(report: Report) -> dict[str, Figure]:
    """The plots that the report's rows allow, by file name without its ending."""
    rows = report.rows
    facts = [
        f"target {wording.target_name(report)}",
        *(f"{name} {value}" for name, value in report_conditions(report).shared.items()),
        f"{' or '.join(map(str, sorted({row.prompts for row in rows})))} prompts",
        *sorted({f"{row.drafter}, K = {row.k}" for row in rows if wording.drafted(row)}),
    ]
    caption = " · ".join(facts)
    made = {
        "acceptance_length": acceptance_length(rows, caption),
        "acceptance_by_position": acceptance_by_position(rows, caption),
        "tpot_by_k": tpot_by_k(report, caption),
        "speedup_by_batch": speedup_by_batch(rows, caption),
        "tpot": tpot(rows, caption),
    }
    return {name: figure for name, figure in made.items() if figure is not None}
