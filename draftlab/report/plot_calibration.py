"""Reliability diagrams: calibrated confidence against the share of drafts that survived."""

from __future__ import annotations

from collections.abc import Iterator

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from draftlab.evaluate.calibration.result import ReliabilityBin
from draftlab.evaluate.results import Report
from draftlab.report.calibration import name
from draftlab.report.canvas import COLOURS, GREY, legend, new_grid, plain

FEWEST = 20
"""Blocks of a bin that is drawn: the share of fewer is mostly noise."""
COLUMNS = 3


def reliability(report: Report) -> Iterator[Figure]:
    """Yield a figure for each calibration, with a diagram for each position.

    A diagram has the raw and the calibrated predictions. On the diagonal the share of blocks whose
    first k drafts were accepted equals the prediction. Bins of fewer than `FEWEST` blocks are left
    out.
    """
    for one in report.calibrations:
        title = f"Reliability, {name(report, one)}"
        columns = min(one.k, 2 if one.k == 4 else COLUMNS)
        figure = new_grid(plain(title), one.k, columns=columns, of=[one])
        for k, (axes, position) in enumerate(zip(figure.axes, one.positions, strict=True), 1):
            if k > one.k - columns:
                axes.set_xlabel("predicted", fontsize=8)
            if k % columns == 1 or columns == 1:
                axes.set_ylabel("observed", fontsize=8)
            axes.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle=":")
            _draw(axes, position.before, "raw confidence", COLOURS[1], hollow=True)
            _draw(axes, position.after, "calibrated", COLOURS[0], hollow=False)
            axes.set_title(f"first {k} accepted" if k > 1 else "first draft accepted", fontsize=8)
            axes.set(xlim=(0, 1), ylim=(0, 1), xticks=(0, 0.5, 1), yticks=(0, 0.5, 1))
            axes.set_aspect("equal")
            axes.tick_params(labelsize=7)
        legend(figure)
        yield figure


def _draw(axes: Axes, bins: list[ReliabilityBin], label: str, colour: str, *, hollow: bool) -> None:
    drawn = [one for one in bins if one.count >= FEWEST]
    axes.plot(
        [one.predicted for one in drawn],
        [one.observed for one in drawn],
        label=label,
        color=colour,
        marker="s" if hollow else "o",
        markersize=3.5,
        linewidth=1.2,
        markerfacecolor="white" if hollow else colour,
        linestyle="--" if hollow else "-",
        clip_on=False,
    )
