"""Plots of acceptance by draft position and by temperature."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from matplotlib.figure import Figure

from draftlab.evaluate.results import Row
from draftlab.report import formatting as fmt
from draftlab.report.canvas import error_bars, legend, line_style, new_figure, plain
from draftlab.report.conditions import row_labels, row_traits
from draftlab.report.plot_times import series


def acceptance_by_position(rows: Sequence[Row]) -> Iterator[Figure]:
    """Yield plots of the unconditional acceptance at each draft position, one for each head.

    A plot has only the head's largest K, whose first positions equal those of smaller values, and a
    line for each temperature, for argmax drafts and for sampled drafts. If every plot had one line,
    all lines share one plot. Nothing is yielded if nothing was drafted.
    """
    drafted = [row for row in rows if row.counters.acceptance_at]
    max_k: dict[tuple[str | None, str], int] = {}
    for row in drafted:
        key = (row.head, row.engine)
        max_k[key] = max(row.k, max_k.get(key, 0))
    shown = [row for row in drafted if row.k == max_k[row.head, row.engine]]
    groups: dict[str, list[Row]] = {}
    for row, traits in zip(shown, row_traits(shown, without=("K", "drafting")), strict=True):
        groups.setdefault(", ".join(traits), []).append(row)
    if all(len(here) == 1 for here in groups.values()):
        groups = {"": shown} if shown else {}
    modes = sorted({(row.temperature, fmt.drafting(row)) for row in shown})
    for name, here in groups.items():
        figure = new_figure("Acceptance by draft position" + f", {name}" * bool(name), of=here)
        axes = figure.axes[0]
        for i, (row, label) in enumerate(zip(here, row_labels(here), strict=True)):
            mode = row.temperature, fmt.drafting(row)
            axes.plot(
                range(1, row.k + 1),
                row.counters.acceptance_at,
                label=plain(label),
                # the same colour for the same temperature in the plots of all heads
                **line_style(modes.index(mode) if name else i, sampled=mode[1] == "sampled"),
            )
        axes.set(
            xlabel="draft position i",
            ylabel="share of drafts accepted up to i",
            ylim=(0, 1.03),
            xticks=range(1, max(row.k for row in here) + 1),
        )
        legend(figure)
        yield figure


def acceptance_length(rows: Sequence[Row]) -> Iterator[Figure]:
    """Yield a plot of AL at each measured temperature; none for fewer than two temperatures."""
    measured = [row for row in rows if row.acceptance_length is not None]
    temperatures = sorted({row.temperature for row in measured})
    if len(temperatures) < 2:
        return
    styles = series(measured)
    figure = new_figure("Acceptance length by temperature", of=measured)
    axes = figure.axes[0]
    present = {
        t: [name for row, (name, _) in zip(measured, styles, strict=True) if row.temperature == t]
        for t in temperatures
    }
    width = 0.7 / max(map(len, present.values()))
    for name, style in dict(styles).items():
        # side by side, without lines: nothing was measured between temperatures
        places, here = [], []
        for row, (label, _) in zip(measured, styles, strict=True):
            if label == name:
                names = present[row.temperature]
                shift = (names.index(name) - (len(names) - 1) / 2) * width
                places.append(temperatures.index(row.temperature) + shift)
                here.append(row)
        lengths = [row.acceptance_length for row in here]
        axes.errorbar(
            places,
            lengths,
            yerr=error_bars(lengths, [row.acceptance_length_ci for row in here]),
            capsize=3,
            label=name,
            **style | {"linestyle": "none"},
        )
    axes.set(xlabel="temperature T", ylabel="AL (tokens per verify step)")
    axes.set_xticks(range(len(temperatures)), map(fmt.temperature, temperatures))
    axes.set_xlim(-0.5, len(temperatures) - 0.5)
    axes.grid(visible=False, axis="x")
    axes.set_ylim(bottom=1)  # AL = 1: nothing accepted
    legend(figure)
    yield figure
