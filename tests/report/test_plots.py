"""The plots show the report's numbers, units and conditions, and leave no global state."""

from __future__ import annotations

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure

from draftlab.report import plots
from draftlab.report.canvas import GREY, png
from tests.helpers import sample_report as sample


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].get_legend().get_texts()]


def test_acceptance_by_position_draws_each_drafted_row() -> None:
    report = sample.report()
    figure = plots.acceptance_by_position(report.rows, "")
    drawn = [line for line in figure.axes[0].lines if line.get_marker() != "x"]
    drafted = [report.rows[i] for i in (1, 3, 4)]
    for line, row in zip(drawn, drafted, strict=True):
        assert list(line.get_xdata()) == [1, 2, 3, 4]
        assert line.get_ydata() == pytest.approx(np.array(row.accepted_at) / row.drafts)
    assert [line.get_linestyle() for line in drawn] == ["-", "--", "-"]
    crosses = [line for line in figure.axes[0].lines if line.get_marker() == "x"]
    assert [list(line.get_ydata()) for line in crosses] == [
        row.expected_acceptance for row in drafted[1:]
    ]
    assert legend(figure) == [
        "T = 0", "T = 0.8, draft probs off", "T = 0.8, draft probs on", "expected (self-check)",
    ]  # fmt: skip
    assert len({line.get_color() for line in drawn}) == len({line.get_marker() for line in drawn})


def test_acceptance_length_needs_two_temperatures() -> None:
    assert plots.acceptance_length([sample.baseline(), sample.row()], "") is None
    assert plots.acceptance_length([sample.row(), sample.baseline(0.8)], "") is None
    assert "acceptance_length" not in plots.figures(sample.report([sample.row()]))


def test_acceptance_length_has_intervals_and_the_greedy_row_in_both_lines() -> None:
    report = sample.report()
    figure = plots.acceptance_length(report.rows, "")
    greedy, off, on = (report.rows[i] for i in (1, 3, 4))
    bars = figure.axes[0].containers
    assert [bar.get_label() for bar in bars] == ["draft probs on", "draft probs off"]
    for bar, rows in zip(bars, ([greedy, on], [greedy, off]), strict=True):
        line, _, (segments,) = bar.lines
        assert list(line.get_ydata()) == [row.acceptance_length for row in rows]
        assert line.get_xdata() == pytest.approx([0, 0.8], abs=0.02)
        ends = [(low[1], high[1]) for low, high in segments.get_segments()]
        assert np.ravel(ends) == pytest.approx(np.ravel([row.acceptance_length_ci for row in rows]))
    assert figure.axes[0].get_ylim()[0] == 1


def test_lines_join_rows_that_differ_in_temperature_only() -> None:
    rows = [
        sample.row(temperature=t, k=k, draft_temperature=None)
        for k in (2, 4)
        for t in (1.5, 0.0, 0.7)
    ]
    bars = plots.acceptance_length(rows, "").axes[0].containers
    assert [bar.get_label() for bar in bars] == ["draft probs off, K = 2", "draft probs off, K = 4"]
    for bar in bars:
        assert bar.lines[0].get_xdata() == pytest.approx([0, 0.7, 1.5], abs=0.02)


def test_tpot_draws_baselines_in_grey_from_zero() -> None:
    report = sample.report()
    axes = plots.tpot(report.rows, "").axes[0]
    bars = axes.patches
    assert [bar.get_width() for bar in bars] == [row.tpot_ms for row in report.rows]
    grey = matplotlib.colors.to_rgba(GREY)
    assert [bar.get_facecolor() == grey for bar in bars] == [True, False, True, False, False]
    assert axes.get_xlim()[0] == 0
    texts = [text.get_text().strip() for text in axes.texts]
    assert texts[0] == "9.84"
    assert texts[1] == f"{report.rows[1].tpot_ms:.2f}  ({report.rows[1].speedup:.2f}×)"
    untimed = sample.row(**sample.NOT_TIMED)
    assert len(plots.tpot([*report.rows, untimed], "").axes[0].patches) == 5
    assert plots.tpot([untimed], "") is None


def test_acceptance_by_position_has_panels_of_heads_with_their_largest_k() -> None:
    rows = [
        sample.row(head=head, k=k, temperature=t, expected_acceptance=None)
        for head in ("a", "b")
        for t in (0.0, 0.8)
        for k in (2, 5)
    ]
    title = "Acceptance by draft position"
    several = plots.acceptance_by_position(rows, "")
    # heads with one line each share a panel
    alone = plots.acceptance_by_position([rows[1], rows[5]], "")
    assert [axes.get_title(loc="left") for axes in several.axes] == [f"{title}, a", f"{title}, b"]
    assert [axes.get_title(loc="left") for axes in alone.axes] == [title]
    assert legend(alone) == ["T = 0, a", "T = 0, b"]
    assert len({line.get_color() for line in alone.axes[0].lines}) == 2
    for figure, shown in ((several, rows[1::2]), (alone, [rows[1], rows[5]])):
        lines = [line for axes in figure.axes for line in axes.lines]
        for line, row in zip(lines, shown, strict=True):
            assert line.get_ydata() == pytest.approx(np.array(row.accepted_at) / row.drafts)


def test_tpot_by_k_has_measurements_and_the_advisers_lines() -> None:
    report = sample.timed_report()
    figure = plots.tpot_by_k(report, "")
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "TPOT by K, T = 0", "TPOT by K, T = 0.8",
    ]  # fmt: skip
    axes = figure.axes[0]
    rows = [row for row in report.rows if row.temperature == 0 and row.k]
    points = [container.lines[0] for container in axes.containers]
    assert [(list(p.get_xdata()), list(p.get_ydata())) for p in points] == [
        ([row.k], [row.timings[0].tpot_ms]) for row in rows
    ]
    (advice,) = [
        one for one in report.adviser["advice"] if one["temperature"] == 0 and one["batch"] == 1
    ]
    drawn = [list(line.get_ydata()) for line in axes.lines]
    assert [p["tpot_ms"] for p in advice["predictions"]] in drawn
    assert [rows[0].timings[0].baseline_tpot_ms] * 2 in drawn
    low, high = axes.get_ylim()
    assert low == 0
    assert high > max(row.timings[0].tpot_ms for row in report.rows if row.k)
    assert "ms" in axes.get_ylabel()
    assert plots.tpot_by_k(sample.report(), "") is None


def test_speedup_by_batch_needs_two_batches() -> None:
    report = sample.timed_report()
    figure = plots.speedup_by_batch(report.rows, "")
    bars = figure.axes[0].containers
    rows = [row for row in report.rows if row.temperature == 0 and row.k]
    for bar, row in zip(bars, rows, strict=True):
        assert list(bar.lines[0].get_ydata()) == [t.speedup for t in row.timings]
    ticks = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert ticks == ["1", "8"]
    styles = {c.get_label(): c.lines[0].get_linestyle() for c in figure.axes[1].containers}
    assert {style for name, style in styles.items() if name.endswith("off")} == {"--"}
    assert {style for name, style in styles.items() if name.endswith("on")} == {"-"}
    once = [row.model_copy(update={"timings": row.timings[:1]}) for row in report.rows]
    assert plots.speedup_by_batch(once, "") is None
    assert plots.speedup_by_batch(sample.report().rows, "") is None


def test_a_large_grid_stays_readable() -> None:
    rows = [
        sample.row(head=head, k=k, temperature=t, draft_probs=probs, prompts=4)
        for head in ("quickstart", "reference")
        for k in (3, 5)
        for t in (0.0, 0.7, 1.0, 1.3, 1.5, 2.0)
        for probs in ((False, True) if t else (False,))
    ]
    figures = plots.figures(sample.report(rows))
    assert "tpot" not in figures  # 44 bars
    for figure in figures.values():
        png(figure)  # lays the figure out
        canvas = figure.canvas.get_renderer()
        (key,) = figure.legends
        inside = key.get_window_extent(canvas)
        assert inside.x1 <= figure.bbox.x1
        for axes in figure.axes:
            assert axes.get_tightbbox(canvas).y1 <= inside.y0 + 1
            assert axes.get_position().height * figure.get_size_inches()[1] > 1.5


@pytest.mark.parametrize("name", ["draftlab-embedded-12m", "a very long name of a target " * 12])
def test_every_plot_has_labels_units_and_conditions_below_its_axes(name: str) -> None:
    report = sample.report()
    report.target["name"] = name
    figures = plots.figures(report)
    assert list(figures) == ["acceptance_length", "acceptance_by_position", "tpot"]
    for figure in figures.values():
        axes = figure.axes[0]
        assert axes.get_xlabel()
        assert axes.get_title(loc="left")
        (caption,) = figure.texts
        text = " ".join(caption.get_text().split())
        for condition in (name.strip(), "dtype float32", "64 prompts", "chain, K = 4"):
            assert condition in text
        png(figure)  # lays the figure out
        canvas = figure.canvas.get_renderer()
        box = caption.get_window_extent(canvas)
        assert box.x1 <= figure.bbox.x1
        assert 0 <= box.y0 <= box.y1 <= axes.get_tightbbox(canvas).y0
    assert "ms" in figures["tpot"].axes[0].get_xlabel()
    assert figures["acceptance_length"].axes[0].get_ylabel()


def test_png_files_are_reproducible_and_change_nothing_global() -> None:
    """Dollar signs in names are not read as mathematics."""
    from matplotlib import _pylab_helpers

    before = dict(matplotlib.rcParams)
    rows = [sample.row(head=r"$\frac$ a"), sample.row(head="b$c$")]
    for report in (sample.report(rows), sample.report()):
        for figure in plots.figures(report).values():
            assert png(figure).startswith(b"\x89PNG")
            assert png(figure) == png(figure)
    assert dict(matplotlib.rcParams) == before
    assert not _pylab_helpers.Gcf.figs
