"""Plots of times: TPOT of every row, TPOT by K, speed-up by batch."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from draftlab.evaluate.results import Report, Row
from draftlab.report import formatting as fmt
from draftlab.report.canvas import (
    COLOURS,
    GREY,
    error_bars,
    legend,
    line_style,
    new_figure,
    pick_evenly,
    plain,
)
from draftlab.report.conditions import row_labels

MAX_BARS = 24


def tpot(rows: Sequence[Row], caption: str) -> Figure | None:
    """Return a bar plot of the TPOT of every row; rows without drafting are grey.

    The result is None if nothing was timed or there are more than `MAX_BARS` rows.
    """
    shown = [
        (row, label)
        for row, label in zip(rows, row_labels(rows), strict=True)
        if row.tpot_ms is not None
    ]
    if not 0 < len(shown) <= MAX_BARS:
        return None
    figure = new_figure("Time per output token", caption, height=1.3 + 0.42 * len(shown))
    axes = figure.axes[0]
    for i, (row, _) in enumerate(shown):
        axes.barh(
            i,
            row.tpot_ms,
            height=0.62,
            color=COLOURS[0] if fmt.has_drafter(row) else GREY,
            xerr=error_bars([row.tpot_ms], [row.tpot_ms_ci]),
            capsize=3,
            ecolor="#222222",
        )
        right = max(row.tpot_ms, row.tpot_ms_ci[1] if row.tpot_ms_ci else 0.0)
        speedup = f"  ({fmt.factor(row.speedup)})" if row.speedup is not None else ""
        text = f"  {fmt.milliseconds(row.tpot_ms)}{speedup}"
        axes.text(right, i, text, va="center", fontsize=8.5)
    names = [textwrap.fill(plain(label), 36, break_on_hyphens=False) for _, label in shown]
    axes.set_yticks(range(len(shown)), names, fontsize=8.5)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.22)
    axes.set_xlim(left=0)
    axes.set_xlabel("TPOT in ms (in brackets: speed-up)")
    return figure


class _Styles:
    """Line styles and legend names: colour and marker for head, engine and K, dashes for draft
    probabilities that are off."""

    def __init__(self, rows: Sequence[Row], *, with_k: bool) -> None:
        self.with_k = with_k and len({row.k for row in rows}) > 1
        self.with_engine = len({row.engine for row in rows}) > 1
        self.with_drafter = fmt.has_chain_and_parallel(rows)
        self.names = list(dict.fromkeys(self._name(row) for row in rows))

    def _name(self, row: Row) -> str:
        parts = [row.head or "unnamed"]
        parts += [row.drafter] if self.with_drafter else []
        parts += [row.engine] if self.with_engine else []
        parts += [f"K = {row.k}"] if self.with_k else []
        return ", ".join(parts)

    def name(self, row: Row) -> str:
        """Return the name in the legend."""
        probs = fmt.draft_probs(row)
        return self._name(row) + ("" if probs == fmt.NONE else f", draft probs {probs}")

    def style(self, row: Row) -> dict[str, str]:
        """Return colour, marker and line style."""
        number = self.names.index(self._name(row))
        return line_style(number, dashed=fmt.draft_probs(row) == "off")


def tpot_by_k(report: Report, caption: str) -> Figure | None:
    """Return a plot of TPOT by K at the first timed batch, with a panel per temperature.

    Points are measured, lines are the adviser's predictions. The result is None without advice.
    """
    advice = (report.adviser or {}).get("advice", [])
    rows = [row for row in report.rows if fmt.has_drafter(row) and row.timings]
    if not advice or not rows:
        return None
    batch = rows[0].timings[0].batch
    temperatures = pick_evenly([one["temperature"] for one in advice])
    titles = [f"T = {fmt.temperature(t)}" for t in temperatures]
    figure = new_figure("TPOT by K", f"{caption} · timed batch {batch}", panels=titles, height=3.2)
    styles = _Styles(rows, with_k=False)
    for axes, t in zip(figure.axes, temperatures, strict=True):
        here = [row for row in rows if row.temperature == t]
        for row in here:
            timing, style = row.timings[0], styles.style(row)
            axes.errorbar(
                [row.k],
                [timing.tpot_ms],
                yerr=error_bars([timing.tpot_ms], [timing.tpot_ms_ci]),
                capsize=3,
                **style | {"linestyle": "none"},
            )
            axes.plot([], [], label=plain(styles.name(row)), **style)
        for row in {styles.name(row): row for row in here}.values():
            for one in advice:
                if _belongs_to(one, row, batch):
                    axes.plot(
                        [p["k"] for p in one["predictions"]],
                        [p["tpot_ms"] for p in one["predictions"]],
                        **styles.style(row) | {"marker": ""},
                    )
        max_k = max(row.k for row in here)
        bases = sorted({row.timings[0].baseline_tpot_ms or 0.0 for row in here} - {0.0})
        for base in bases:
            axes.axhline(base, color=GREY, linewidth=1.5, label="no drafting")
        axes.set(xlabel="K (drafts a step)", ylabel="TPOT in ms", xticks=range(1, max_k + 1))
        axes.set_xlim(0.7, max_k + 0.3)
    figure.axes[0].set_ylim(bottom=0)  # last, since it ends autoscaling for all panels
    legend(figure)
    return figure


def _belongs_to(one: Mapping[str, Any], row: Row, batch: int) -> bool:
    """Return whether an advice belongs to the row's configuration and the batch."""
    keys = ("engine", "head", "temperature", "draft_probs")
    return one["batch"] == batch and all(one[key] == getattr(row, key) for key in keys)


def speedup_by_batch(rows: Sequence[Row], caption: str) -> Figure | None:
    """Return a plot of the speed-up by batch size, with a panel per temperature.

    The result is None if no row was timed at two batch sizes.
    """
    shown = [row for row in rows if len([t for t in row.timings if t.speedup]) > 1]
    if not shown:
        return None
    temperatures = pick_evenly([row.temperature for row in shown])
    titles = [f"T = {fmt.temperature(t)}" for t in temperatures]
    figure = new_figure("Speed-up by batch", caption, panels=titles, height=3.2)
    styles = _Styles(shown, with_k=True)
    batches = sorted({timing.batch for row in shown for timing in row.timings})
    for axes, t in zip(figure.axes, temperatures, strict=True):
        here = [row for row in shown if row.temperature == t]
        for i, row in enumerate(here):
            timed = [timing for timing in row.timings if timing.speedup is not None]
            shift = (i - (len(here) - 1) / 2) * 0.05  # draws intervals side by side
            speedups = [one.speedup for one in timed]
            axes.errorbar(
                [batches.index(one.batch) + shift for one in timed],
                speedups,
                yerr=error_bars(speedups, [one.speedup_ci for one in timed]),
                capsize=3,
                label=plain(styles.name(row)),
                **styles.style(row),
            )
        axes.axhline(1, color=GREY, linewidth=1.5)
        axes.set_xticks(range(len(batches)), [str(batch) for batch in batches])
        axes.set(xlabel="prompts decoded at once", ylabel="speed-up (×)")
    figure.axes[0].set_ylim(bottom=0)  # last, since it ends autoscaling for all panels
    legend(figure)
    return figure
