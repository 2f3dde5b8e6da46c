"""Measurements under load in the console, on the page and as a plot."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from draftlab.report.html import render_html, write_html
from draftlab.report.load import load_tables
from draftlab.report.plot_load import goodput_by_speed
from draftlab.report.table import print_report
from tests.helpers import sample_report as sample


def console_text(width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_report(sample.loaded_report(), console)
    return console.file.getvalue()


def test_the_best_of_each_concurrency_is_marked_once() -> None:
    report = sample.loaded_report()
    tables = load_tables(report.load)
    assert [table.title for table in tables] == ["T = 0", "T = 0.8"]
    for table in tables:
        assert table.concurrencies == [1, 4, 64]
        for column, concurrency in enumerate(table.concurrencies):
            (best,) = (name for name, cells in table.rows if cells[column].best)
            here = [p for p in report.load if p.concurrency == concurrency]
            assert best == max(here, key=lambda p: p.goodput_tok_s).configuration
    names = [name for name, cells in tables[0].rows if cells[2].best]
    assert names == ["no drafting"]  # at 64 requests a row costs more than it gains


def test_a_point_that_was_not_measured_has_no_cell() -> None:
    points = [p for p in sample.loaded_report().load if (p.k, p.concurrency) != (3, 4)]
    rows = dict(load_tables(points)[0].rows)
    assert rows["a head, K=3, argmax drafts"][1] is None
    assert rows["a head, K=3, argmax drafts"][2] is not None


def test_several_engines_have_their_own_tables() -> None:
    points = [sample.load_point(2, 1), sample.load_point(2, 1, engine="another")]
    assert [t.title for t in load_tables(points)] == ["T = 0, draftlab", "T = 0, another"]


def test_the_console_shows_goodput_and_what_it_is() -> None:
    text = console_text()
    point = sample.load_point(1, 3)
    assert f"{point.goodput_tok_s:,.0f} ({point.speedup:.2f}×)" in text
    assert "at once" in text
    assert "goodput" in text
    assert "while so many requests always run" in " ".join(text.split())


def test_the_page_has_tables_times_and_advice(tmp_path: Path) -> None:
    report = sample.loaded_report()
    page = write_html(report, tmp_path).read_text(encoding="utf-8")
    for shown in (
        "Goodput under load, T\xa0=\xa00.8",
        "Times under load",
        "TTFT p50",
        "7.50 [7.00, 8.00]",
    ):
        assert shown in page
    assert "How many drafts under load?" in page
    assert "drafting is predicted not to pay" in page
    assert {path.name for path in tmp_path.glob("goodput*.png")} == {
        "goodput_1.png",
        "goodput_2.png",
    }
    without = render_html(sample.report(), [])
    assert "under load" not in without.partition('<dl class="terms">')[0]


def test_a_curve_for_each_configuration_with_numbered_points() -> None:
    figures = list(goodput_by_speed(sample.loaded_report()))
    assert len(figures) == 2
    (axes,) = figures[0].axes
    assert [line.get_label() for line in axes.lines] == [
        "no drafting", *(f"a head, K={k}, argmax drafts" for k in (1, 3, 5)),
    ]  # fmt: skip
    plain = [sample.load_point(c, 0) for c in (1, 4, 64)]
    assert axes.lines[0].get_xdata() == pytest.approx([p.user_tok_s for p in plain])
    assert axes.lines[0].get_ydata() == pytest.approx([p.goodput_tok_s for p in plain])
    assert [text.get_text() for text in axes.texts] == ["1", "4", "64"] * 4
    assert list(goodput_by_speed(sample.report())) == []


def test_warnings_under_load_name_their_configuration() -> None:
    point = sample.load_point(4, 3, warnings=["at concurrency 4 only 2.0 requests ran at once"])
    report = sample.report().model_copy(update={"load": [point]})
    console = Console(file=io.StringIO(), width=200)
    print_report(report, console)
    assert "ran at once (T = 0, a head, K=3, argmax drafts)" in console.file.getvalue()
