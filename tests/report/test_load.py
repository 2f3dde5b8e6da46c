"""Measurements under load in the console, on the page and as a plot."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from draftlab.report import print_report
from draftlab.report.html import write_html
from draftlab.report.load import goodput
from draftlab.report.plots import goodput_by_speed
from draftlab.report.sections import sections
from tests.helpers import sample_report as sample


def console_text(width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_report(sample.loaded_report(), console)
    return console.file.getvalue()


def test_the_best_of_each_concurrency_is_marked_once() -> None:
    report = sample.loaded_report()
    tables = goodput(report.load)
    assert [one.title for one in tables] == [f"Goodput under load, T = {t}" for t in ("0", "0.8")]
    for one in tables:
        columns = one.table.columns[1:]
        assert [column.name for column in columns] == [f"{c}\nat once" for c in (1, 4, 64)]
        for i, concurrency in enumerate((1, 4, 64), 1):
            (best,) = (line.cells[0] for line in one.table.lines if line.cells[i].endswith(" *"))
            here = [p for p in report.load if p.concurrency == concurrency]
            assert best == max(here, key=lambda p: p.goodput_tok_s).configuration
        assert best == "no drafting"  # at 64 requests a row costs more than it gains


def test_a_point_that_was_not_measured_has_no_cell() -> None:
    points = [p for p in sample.loaded_report().load if (p.k, p.concurrency) != (3, 4)]
    rows = {line.cells[0]: line.cells[1:] for line in goodput(points)[0].table.lines}
    assert [bool(cell) for cell in rows["a head, K=3, argmax drafts"]] == [True, False, True]


def test_several_engines_have_their_own_tables() -> None:
    points = [sample.load_point(2, 1), sample.load_point(2, 1, engine="another")]
    assert [one.title.partition("T = 0, ")[2] for one in goodput(points)] == ["draftlab", "another"]


def test_the_console_shows_goodput_and_what_it_is() -> None:
    text = console_text()
    point = sample.load_point(1, 3)
    assert f"{point.goodput_tok_s:,.0f} ({point.speedup:.2f}×)" in text
    assert "at once" in text
    assert "goodput" in text
    assert "while so many requests always run" in " ".join(text.split())


def test_times_under_load(tmp_path: Path) -> None:
    report = sample.loaded_report()
    details = {one.title: one.table.lines for one in sections(report) if one.table}
    times = details["Times under load"]
    assert len(times) == len(report.load)
    assert times[0].cells[:3] == ["T = 0, no drafting", "1", "1.0"]
    assert times[0].cells[6] == "7.50 [7.00, 8.00]"
    write_html(report, tmp_path)
    names = {path.name for path in tmp_path.glob("goodput*.png")}
    assert names == {"goodput_1.png", "goodput_2.png"}
    assert not [one for one in sections(sample.report()) if "under load" in one.title]


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
