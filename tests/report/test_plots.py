"""The plots show the report's numbers, units and conditions, and leave no global state."""

from __future__ import annotations

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure

from draftlab.evaluate.results import Report
from draftlab.report.plots import (
    acceptance_by_position,
    plots,
    png,
    tpot_by_k,
)
from tests.helpers import sample_report as sample


def drawn(report: Report) -> dict[str, Figure]:
    return {one.figure.name: one.figure.figure for one in plots(report)}


def test_acceptance_by_position_draws_each_head_with_its_largest_k() -> None:
    rows = [
        sample.row(head=head, k=k, temperature=t, draft_probs=probs)
        for head in ("a", "b")
        for t, probs in ((0.0, False), (0.8, False), (0.8, True))
        for k in (2, 5)
    ]
    greedy, warm = acceptance_by_position(sample.report([sample.baseline(), *rows]))
    title = "Acceptance by draft position"
    assert [one.get_suptitle() for one in (greedy, warm)] == [f"{title}, T = {t}" for t in (0, 0.8)]
    for figure, shown in ((greedy, rows[1::6]), (warm, [rows[i] for i in (3, 5, 9, 11)])):
        lines = figure.axes[0].lines
        for line, row in zip(lines, shown, strict=True):
            assert list(line.get_xdata()) == [1, 2, 3, 4, 5]
            assert line.get_ydata() == pytest.approx(np.array(row.accepted_at) / row.drafts)
            assert line.get_linestyle() == ("-" if row.draft_probs else "--")
            assert line.get_label().startswith(row.head)
        for different in ("color", "marker"):
            assert len({getattr(line, f"get_{different}")() for line in lines}) == len(shown)


def test_tpot_by_k_has_measurements_and_the_advisers_lines() -> None:
    report = sample.timed_report()
    greedy, warm = tpot_by_k(report)
    axes, title = greedy.axes[0], "Time per output token by K"
    assert greedy.get_suptitle() == f"{title}, T = 0, batch 1"
    assert warm.get_suptitle() == f"{title}, T = 0.8, batch 1"
    rows = [row for row in report.rows if row.temperature == 0 and row.k]
    points = [container.lines[0] for container in axes.containers]
    assert [(list(p.get_xdata()), list(p.get_ydata())) for p in points] == [
        ([row.k], [row.timings[0].tpot_ms]) for row in rows
    ]
    (advice,) = [
        one for one in report.adviser["advice"] if one["temperature"] == 0 and one["batch"] == 1
    ]
    lines = [list(line.get_ydata()) for line in axes.lines]
    assert [p["tpot_ms"] for p in advice["predictions"]] in lines
    assert [rows[0].timings[0].baseline_tpot_ms] * 2 in lines
    low, high = axes.get_ylim()
    assert low == 0
    assert high > max(row.timings[0].tpot_ms for row in report.rows if row.k)
    assert "ms" in axes.get_ylabel()
    assert not list(tpot_by_k(sample.report()))
    assert set(drawn(report)) >= {"tpot_by_k_1", "tpot_by_k_2"}


def test_png_files_are_reproducible_and_change_nothing_global() -> None:
    """Dollar signs in names are not read as mathematics."""
    from matplotlib import _pylab_helpers

    before = dict(matplotlib.rcParams)
    rows = [sample.row(head=r"$\frac$ a"), sample.row(head="b$c$")]
    for report in (sample.report(rows), sample.report()):
        first, second = drawn(report), drawn(report)
        for name, figure in first.items():
            data = png(figure)
            assert data.startswith(b"\x89PNG")
            assert data == png(second[name])
    assert dict(matplotlib.rcParams) == before
    assert not _pylab_helpers.Gcf.figs
