"""The plots show the report's numbers, units and conditions, and leave no global state."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from draftlab.evaluate.results import Report
from draftlab.report import write_html
from draftlab.report.canvas import png
from draftlab.report.plot_acceptance import acceptance_by_position, acceptance_length
from draftlab.report.plot_times import speedup_by_batch, tpot_by_k
from draftlab.report.plots import PLOTS, plots
from tests.helpers import sample_report as sample


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def drawn(report: Report) -> dict[str, Figure]:
    return {one.figure.name: one.figure.figure for one in plots(report)}


def test_acceptance_by_position_draws_each_drafted_row() -> None:
    report = sample.report()
    (figure,) = acceptance_by_position(report.rows)
    lines = figure.axes[0].lines
    for line, i in zip(lines, (1, 3, 4), strict=True):
        row = report.rows[i]
        assert list(line.get_xdata()) == [1, 2, 3, 4]
        assert line.get_ydata() == pytest.approx(np.array(row.accepted_at) / row.drafts)
    assert [line.get_linestyle() for line in lines] == ["--", "--", "-"]
    assert legend(figure) == [
        "T = 0, argmax drafts",
        "T = 0.8, argmax drafts",
        "T = 0.8, sampled drafts",
    ]
    for different in ("color", "marker"):
        assert len({getattr(line, f"get_{different}")() for line in lines}) == 3


def test_argmax_and_sampled_drafts_differ_in_colour_marker_and_legend() -> None:
    for figure in drawn(sample.timed_report()).values():
        styles: dict[str, set[tuple[str, str]]] = {"argmax": set(), "sampled": set()}
        handles, labels = figure.axes[0].get_legend_handles_labels()
        assert set(labels) == set(legend(figure))
        for handle, label in zip(handles, labels, strict=True):
            line = handle.lines[0] if hasattr(handle, "lines") else handle
            for mode, found in styles.items():
                if mode in label:
                    found.add((line.get_color(), line.get_marker()))
                    assert (line.get_markerfacecolor() == "white") == (mode == "argmax")
        assert styles["argmax"]
        for one, other in product(*styles.values()):
            assert one[0] != other[0]
            assert one[1] != other[1]


def test_acceptance_length_needs_two_temperatures() -> None:
    assert not list(acceptance_length([sample.baseline(), sample.row()]))
    assert not list(acceptance_length([sample.row(), sample.baseline(0.8)]))
    assert "acceptance_length" not in drawn(sample.report([sample.row()]))


def test_acceptance_length_has_points_with_intervals_and_no_lines() -> None:
    report = sample.report()
    (figure,) = acceptance_length(report.rows)
    greedy, off, on = (report.rows[i] for i in (1, 3, 4))
    bars = figure.axes[0].containers
    assert [bar.get_label() for bar in bars] == ["argmax drafts", "sampled drafts"]
    for bar, rows, places in zip(bars, ([greedy, off], [on]), ([0, 1], [1]), strict=True):
        line, _, (segments,) = bar.lines
        assert line.get_linestyle() == "None"
        assert list(line.get_ydata()) == [row.acceptance_length for row in rows]
        assert line.get_xdata() == pytest.approx(places, abs=0.2)
        ends = [(low[1], high[1]) for low, high in segments.get_segments()]
        assert np.ravel(ends) == pytest.approx(np.ravel([row.acceptance_length_ci for row in rows]))
    assert [text.get_text() for text in figure.axes[0].get_xticklabels()] == ["0", "0.8"]
    assert figure.axes[0].get_ylim()[0] == 1


def test_points_of_a_name_differ_in_temperature_only() -> None:
    rows = [sample.row(temperature=t, k=k) for k in (2, 4) for t in (1.5, 0.0, 0.7)]
    (figure,) = acceptance_length(rows)
    bars = figure.axes[0].containers
    assert [bar.get_label() for bar in bars] == ["K = 2", "K = 4"]
    for bar in bars:
        assert sorted(bar.lines[0].get_xdata()) == pytest.approx([0, 1, 2], abs=0.2)


def test_acceptance_by_position_has_a_plot_for_each_head_with_its_largest_k() -> None:
    rows = [
        sample.row(head=head, k=k, temperature=t, expected_acceptance=None)
        for head in ("a", "b")
        for t in (0.0, 0.8)
        for k in (2, 5)
    ]
    title = "Acceptance by draft position"
    several = list(acceptance_by_position(rows))
    # heads with one line each share a plot
    alone = list(acceptance_by_position([rows[1], rows[5]]))
    for figures, titles in ((several, [f"{title}, a", f"{title}, b"]), (alone, [title])):
        assert [figure.axes[0].get_title(loc="left") for figure in figures] == titles
    assert legend(alone[0]) == ["T = 0, a", "T = 0, b"]
    assert len({line.get_color() for line in alone[0].axes[0].lines}) == 2
    for figures, shown in ((several, rows[1::2]), (alone, [rows[1], rows[5]])):
        lines = [line for figure in figures for line in figure.axes[0].lines]
        for line, row in zip(lines, shown, strict=True):
            assert line.get_ydata() == pytest.approx(np.array(row.accepted_at) / row.drafts)


def test_tpot_by_k_has_measurements_and_the_advisers_lines() -> None:
    report = sample.timed_report()
    greedy, warm = tpot_by_k(report)
    axes, title = greedy.axes[0], "Time per output token by K"
    assert axes.get_title(loc="left") == f"{title}, T = 0, batch 1"
    assert warm.axes[0].get_title(loc="left") == f"{title}, T = 0.8, batch 1"
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
    figure, warm = speedup_by_batch(report.rows)
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
    assert not list(speedup_by_batch(once))
    assert not list(speedup_by_batch(sample.report().rows))


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
    assert list(figures) == ["acceptance_length", "acceptance_by_position"]
    for name, figure in figures.items():
        axes = figure.axes[0]
        assert axes.get_xlabel()
        assert axes.get_title(loc="left")
        with Image.open(tmp_path / f"{name}.png") as image:
            for condition in ("target draftlab-embedded-12m", "dtype float32", "prompts 64"):
                assert condition in image.info["Description"]
    assert figures["acceptance_length"].axes[0].get_ylabel()


def test_a_caption_names_heads_and_temperatures() -> None:
    reports = sample.timed_report(), sample.loaded_report()
    captions = {one.figure.name: one.text for report in reports for one in plots(report)}
    for name, end in {
        "acceptance_length": "Head head; T = 0, 0.8.",
        "tpot_by_k_1": "Head head; T = 0.",
        "tpot_by_k_2": "Head head; T = 0.8.",
        "speedup_by_batch_2": "Head head; T = 0.8.",
        "goodput_1": "Head a head; T = 0.",
    }.items():
        assert captions[name] == [f"{PLOTS[name.rstrip('_12')][1]} {end}"]
    rows = [sample.row(head=head) for head in ("a", "b")]
    assert plots(sample.report(rows))[0].text[0].endswith(" Heads a, b; T = 0.")


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
