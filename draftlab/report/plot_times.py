"""Plots of times: TPOT by K, speed-up by batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from matplotlib.figure import Figure

from draftlab.evaluate.results import Report, Row
from draftlab.report import formatting as fmt
from draftlab.report.canvas import (
    GREY,
    error_bars,
    legend,
    line_style,
    new_figure,
    plain,
)
from draftlab.report.conditions import row_traits


def series(rows: Sequence[Row], without: Sequence[str] = ()) -> list[tuple[str, dict[str, Any]]]:
    """Return each row's name in a legend and its line style; rows of one name have one style.

    Args:
        rows: drafted rows.
        without: traits that the names leave out (`conditions.row_traits`).
    """
    names = [
        plain(", ".join(traits) or row.head or "unnamed")
        for row, traits in zip(rows, row_traits(rows, without=without), strict=True)
    ]
    order = list(dict.fromkeys(names))
    return [
        (name, line_style(order.index(name), sampled=fmt.drafting(row) == "sampled"))
        for name, row in zip(names, rows, strict=True)
    ]


def tpot_by_k(report: Report) -> Iterator[Figure]:
    """Yield a plot of TPOT by K at the first timed batch for each temperature.

    Points are measured, lines are the adviser's predictions. Nothing is yielded without advice.
    """
    advice = (report.adviser or {}).get("advice", [])
    rows = [row for row in report.rows if fmt.has_drafter(row) and row.timings]
    if not advice or not rows:
        return
    batch = rows[0].timings[0].batch
    styles = series(rows, without=("K",))
    timings = [timing for row in report.rows for timing in row.timings[:1]]
    measured = [max(timing.tpot_ms_ci or [timing.tpot_ms]) for timing in timings]
    advice = [one for one in advice if one["batch"] == batch]
    predicted = [p["tpot_ms"] for one in advice for p in one["predictions"]]
    top = max(measured + predicted)
    for temperature in sorted({row.temperature for row in rows}):
        here = [one for one in zip(rows, styles, strict=True) if one[0].temperature == temperature]
        where = f"T = {fmt.temperature(temperature)}, batch {batch}"
        figure = new_figure(f"Time per output token by K, {where}", of=[row for row, _ in here])
        axes = figure.axes[0]
        names = list(dict.fromkeys(name for _, (name, _) in here))
        for row, (name, style) in here:
            timing = row.timings[0]
            shift = (names.index(name) - (len(names) - 1) / 2) * 0.08  # side by side
            axes.errorbar(
                [row.k + shift],
                [timing.tpot_ms],
                yerr=error_bars([timing.tpot_ms], [timing.tpot_ms_ci]),
                capsize=3,
                **style | {"linestyle": "none"},
            )
        for name, (row, style) in {name: (row, style) for row, (name, style) in here}.items():
            axes.plot([], [], label=name, **style)
            for one in advice:
                if fmt.belongs_to(one, row):
                    axes.plot(
                        [p["k"] for p in one["predictions"]],
                        [p["tpot_ms"] for p in one["predictions"]],
                        **style | {"marker": ""},
                    )
        for base in sorted({row.timings[0].baseline_tpot_ms or 0.0 for row, _ in here} - {0.0}):
            axes.axhline(base, color=GREY, linewidth=1.5, label="no drafting")
        max_k = max(row.k for row, _ in here)
        axes.set(xlabel="K (drafts a step)", ylabel="TPOT in ms")
        axes.locator_params(axis="x", integer=True)
        axes.set(xlim=(0.7, max_k + 0.3), ylim=(0, 1.05 * top))  # one scale for all temperatures
        legend(figure)
        yield figure


def speedup_by_batch(rows: Sequence[Row]) -> Iterator[Figure]:
    """Yield a plot of the speed-up by batch size for each temperature.

    Nothing is yielded if no row was timed at two batch sizes.
    """
    shown = [row for row in rows if len([t for t in row.timings if t.speedup]) > 1]
    styles = series(shown)
    batches = sorted({timing.batch for row in shown for timing in row.timings})
    tops = [(t.speedup_ci or (0, t.speedup or 0))[1] for row in shown for t in row.timings]
    for temperature in sorted({row.temperature for row in shown}):
        here = [one for one in zip(shown, styles, strict=True) if one[0].temperature == temperature]
        figure = new_figure(
            f"Speed-up by batch, T = {fmt.temperature(temperature)}", of=[row for row, _ in here]
        )
        axes = figure.axes[0]
        for i, (row, (name, style)) in enumerate(here):
            timed = [timing for timing in row.timings if timing.speedup is not None]
            shift = (i - (len(here) - 1) / 2) * 0.4 / len(here)  # draws intervals side by side
            speedups = [one.speedup for one in timed]
            axes.errorbar(
                [batches.index(one.batch) + shift for one in timed],
                speedups,
                yerr=error_bars(speedups, [one.speedup_ci for one in timed]),
                capsize=3,
                label=name,
                **style,
            )
        axes.axhline(1, color=GREY, linewidth=1.5)
        axes.set_xticks(range(len(batches)), [str(batch) for batch in batches])
        axes.set(xlabel="prompts decoded at once", ylabel="speed-up (×)")
        axes.set_ylim(0, 1.05 * max(1, *tops))  # the same for all temperatures
        legend(figure)
        yield figure
