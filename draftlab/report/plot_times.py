"""The plots of times: TPOT of every row, TPOT by K, speed-up by batch."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from draftlab.evaluate.results import Report, Row
from draftlab.report import formatting as wording
from draftlab.report.canvas import COLOURS, GREY, MARKERS, errors, legend, new_figure, plain, spread
from draftlab.report.conditions import row_labels

MOST_BARS = 24


def tpot(rows: Sequence[Row], caption: str) -> Figure | None:
    """TPOT of every row with its interval, rows without drafting in grey.

    None where nothing was timed, and where the bars would be too many to read.
    """
    shown = [
        (row, label)
        for row, label in zip(rows, row_labels(rows), strict=True)
        if row.tpot_ms is not None
    ]
    if not 0 < len(shown) <= MOST_BARS:
        return None
    figure = new_figure("Time per output token", caption, height=1.3 + 0.42 * len(shown))
    axes = figure.axes[0]
    for i, (row, _) in enumerate(shown):
        axes.barh(
            i,
            row.tpot_ms,
            height=0.62,
            color=COLOURS[0] if wording.drafted(row) else GREY,
            xerr=errors(row.tpot_ms, row.tpot_ms_ci),
            capsize=3,
            ecolor="#222222",
        )
        right = max(row.tpot_ms, row.tpot_ms_ci[1] if row.tpot_ms_ci else 0.0)
        speedup = f"  ({wording.times(row.speedup)})" if row.speedup is not None else ""
        text = f"  {wording.milliseconds(row.tpot_ms)}{speedup}"
        axes.text(right, i, text, va="center", fontsize=8.5)
    names = [textwrap.fill(plain(label), 36, break_on_hyphens=False) for _, label in shown]
    axes.set_yticks(range(len(shown)), names, fontsize=8.5)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.22)
    axes.set_xlim(left=0)
    axes.set_xlabel("TPOT in ms (in brackets: speed-up)")
    return figure


class _Ways:
    """The settings of rows within a panel: colour and marker tell head, engine and K; dashes tell
    that draft probabilities are off.
    """

    def __init__(self, rows: Sequence[Row], *, with_k: bool) -> None:
        self.with_k = with_k and len({row.k for row in rows}) > 1
        self.engines = len({row.engine for row in rows}) > 1
        self.kinds = wording.several_drafters(rows)
        self.bases = list(dict.fromkeys(self._base(row) for row in rows))

    def _base(self, row: Row) -> str:
        parts = [row.head or "unnamed"]
        parts += [row.drafter] if self.kinds else []
        parts += [row.engine] if self.engines else []
        parts += [f"K = {row.k}"] if self.with_k else []
        return ", ".join(parts)

    def name(self, row: Row) -> str:
        """As the legend has it."""
        probs = wording.draft_probs(row)
        return self._base(row) + ("" if probs == wording.NONE else f", draft probs {probs}")

    def style(self, row: Row) -> dict[str, str]:
        """Colour, marker and line style."""
        i = self.bases.index(self._base(row))
        return {
            "color": COLOURS[i % len(COLOURS)],
            "marker": MARKERS[i % len(MARKERS)],
            "linestyle": "--" if wording.draft_probs(row) == "off" else "-",
        }


def tpot_by_k(report: Report, caption: str) -> Figure | None:
    """TPOT by K at the first timed batch, a panel a temperature; lines are the adviser's.

    None without the adviser.
    """
    advice = (report.adviser or {}).get("advice", [])
    rows = [row for row in report.rows if wording.drafted(row) and row.timings]
    if not advice or not rows:
        return None
    batch = rows[0].timings[0].batch
    temperatures = spread([one["temperature"] for one in advice])
    titles = [f"T = {wording.temperature(t)}" for t in temperatures]
    figure = new_figure("TPOT by K", f"{caption} · timed batch {batch}", panels=titles, height=3.2)
    ways = _Ways(rows, with_k=False)
    for axes, t in zip(figure.axes, temperatures, strict=True):
        here = [row for row in rows if row.temperature == t]
        for row in here:
            timing, style = row.timings[0], ways.style(row)
            axes.errorbar(
                [row.k],
                [timing.tpot_ms],
                yerr=errors(timing.tpot_ms, timing.tpot_ms_ci),
                capsize=3,
                **style | {"linestyle": "none"},
            )
            axes.plot([], [], label=plain(ways.name(row)), **style)
        for of in {ways.name(row): row for row in here}.values():
            for one in advice:
                if _is_of(one, of, batch):
                    axes.plot(
                        [p["k"] for p in one["predictions"]],
                        [p["tpot_ms"] for p in one["predictions"]],
                        **ways.style(of) | {"marker": ""},
                    )
        deepest = max(row.k for row in here)
        bases = sorted({row.timings[0].baseline_tpot_ms or 0.0 for row in here} - {0.0})
        for base in bases:
            axes.axhline(base, color=GREY, linewidth=1.5, label="no drafting")
        axes.set(xlabel="K (drafts a step)", ylabel="TPOT in ms", xticks=range(1, deepest + 1))
        axes.set_xlim(0.7, deepest + 0.3)
    figure.axes[0].set_ylim(bottom=0)  # last: it ends autoscaling, and all panels share it
    legend(figure)
    return figure


def _is_of(one: Mapping[str, Any], row: Row, batch: int) -> bool:
    """Whether an advice is that of a row's setting at a batch."""
    keys = ("engine", "head", "temperature", "draft_probs")
    return one["batch"] == batch and all(one[key] == getattr(row, key) for key in keys)


def speedup_by_batch(rows: Sequence[Row], caption: str) -> Figure | None:
    """Speed-up by the number of prompts decoded at once, a panel a temperature.

    None where no row was timed at two batches.
    """
    shown = [row for row in rows if len([t for t in row.timings if t.speedup]) > 1]
    if not shown:
        return None
    temperatures = spread([row.temperature for row in shown])
    titles = [f"T = {wording.temperature(t)}" for t in temperatures]
    figure = new_figure("Speed-up by batch", caption, panels=titles, height=3.2)
    ways = _Ways(shown, with_k=True)
    batches = sorted({timing.batch for row in shown for timing in row.timings})
    for axes, t in zip(figure.axes, temperatures, strict=True):
        here = [row for row in shown if row.temperature == t]
        for i, row in enumerate(here):
            timed = [timing for timing in row.timings if timing.speedup is not None]
            spans = [errors(one.speedup, one.speedup_ci) or ((0.0,), (0.0,)) for one in timed]
            shift = (i - (len(here) - 1) / 2) * 0.05  # intervals side by side, not on each other
            axes.errorbar(
                [batches.index(one.batch) + shift for one in timed],
                [one.speedup for one in timed],
                yerr=[[span[side][0] for span in spans] for side in (0, 1)],
                capsize=3,
                label=plain(ways.name(row)),
                **ways.style(row),
            )
        axes.axhline(1, color=GREY, linewidth=1.5)
        axes.set_xticks(range(len(batches)), [str(batch) for batch in batches])
        axes.set(xlabel="prompts decoded at once", ylabel="speed-up (×)")
    figure.axes[0].set_ylim(bottom=0)  # last: it ends autoscaling, and all panels share it
    legend(figure)
    return figure
