"""The plots show the report's numbers, units and conditions, and leave no global state."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from draftlab.evaluate.results import Report
from draftlab.report.html import write_html
from draftlab.report.plots import (
    acceptance_by_position,
    plots,
    png,
    speedup_by_batch,
    tpot_by_k,
)
from tests.helpers import sample_report as sample


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


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


def test_speedup_by_batch_needs_two_batches() -> None:
    report = sample.timed_report()
    figure, warm = speedup_by_batch(report)
    bars = figure.axes[0].containers
    rows = [row for row in report.rows if row.temperature == 0 and row.k]
    for bar, row in zip(bars, rows, strict=True):
        assert list(bar.lines[0].get_ydata()) == [t.speedup for t in row.timings]
    ticks = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert ticks == ["1", "8"]
    styles = {c.get_label(): c.lines[0].get_linestyle() for c in warm.axes[0].containers}
    assert {style for name, style in styles.items() if "argmax" in name} == {"--"}
    assert {style for name, style in styles.items() if "sampled" in name} == {"-"}
    once = [row.model_copy(update={"timings": row.timings[:1]}) for row in report.rows]
    assert not list(speedup_by_batch(sample.report(once)))
    assert not list(speedup_by_batch(sample.report()))


def test_a_large_grid_stays_readable() -> None:
    rows = [
        sample.row(head=head, k=k, temperature=t, draft_probs=probs, prompts=4)
        for head in ("quickstart", "reference")
        for k in (3, 5)
        for t in (0.0, 0.7, 1.0, 1.3, 1.5, 2.0)
        for probs in ((False, True) if t else (False,))
    ]
    named = [sample.row(head="a/very-long-name" * 9), sample.row(head="b")]
    figures = drawn(sample.report(rows))
    figures["long names"] = drawn(sample.report(named))["acceptance_by_position"]
    for figure in figures.values():
        png(figure)  # lays the figure out
        canvas = figure.canvas.get_renderer()
        (key,) = figure.legends
        inside = key.get_window_extent(canvas)
        assert inside.x1 <= figure.bbox.x1
        assert inside.y0 >= 0
        for axes in figure.axes:
            assert axes.get_tightbbox(canvas).y0 >= inside.y1 - 1
            assert axes.get_position().height * figure.get_size_inches()[1] > 1.5


def test_every_plot_has_labels_and_units_and_its_file_the_conditions(tmp_path: Path) -> None:
    report = sample.report()
    write_html(report, tmp_path)
    figures = drawn(report)
    assert list(figures) == ["acceptance_by_position_1", "acceptance_by_position_2"]
    for name, figure in figures.items():
        axes = figure.axes[0]
        assert axes.get_xlabel()
        assert axes.get_ylabel()
        assert figure.get_suptitle()
        with Image.open(tmp_path / f"{name}.png") as image:
            for condition in ("target draftlab-embedded-12m", "dtype float32", "prompts 64"):
                assert condition in image.info["Description"]


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
