"""The HTML page is complete, escaped, and opens without a network."""

from __future__ import annotations

import base64
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from draftlab.evaluate.results import Report
from draftlab.report.html import render_html, write_html
from draftlab.report.sections import sections
from tests.helpers import sample_report as sample

VOID = {"meta", "img", "br", "link", "input", "hr"}


class Page(HTMLParser):
    """A parser that collects attributes and words, and checks that tags are balanced."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            return
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def page(report: Report) -> Page:
    return Page(render_html(sections(report)))


def test_text_from_files_is_escaped() -> None:
    evil = '<script>alert(1)</script>"><img src=x onerror=y>'
    report = sample.report([sample.row(head=evil, warnings=[evil]), sample.row(head="b")])
    report.target["name"] = evil
    report.environment[evil] = {evil: evil}
    text = render_html(sections(report))
    assert "<script" not in text
    assert "<img" not in text
    parsed = Page(text)
    assert not [name for _, name, _ in parsed.attributes if name.startswith("on")]
    assert parsed.text.count("<script>alert(1)</script>") >= 5  # shown as text wherever it belongs


def test_the_page_opens_offline(tmp_path: Path) -> None:
    path = write_html(sample.report(), tmp_path / "eval")
    assert path == tmp_path / "eval" / "report.html"
    text = path.read_text(encoding="utf-8")
    references = [value for _, name, value in Page(text).attributes if name in ("src", "href")]
    images = [value for value in references if value.startswith("data:image/png;base64,")]
    assert [value for value in references if value not in images] == ["report.json"]
    assert not re.search(r"https?://|url\(|@import", text.split("<body>")[0])
    files = {file.name: file.read_bytes() for file in path.parent.glob("*.png")}
    assert sorted(files) == ["acceptance_by_position_1.png", "acceptance_by_position_2.png"]
    embedded = {base64.b64decode(value.partition(",")[2]) for value in images}
    assert embedded == set(files.values())
    assert all(data.startswith(b"\x89PNG\r\n") for data in embedded)
    assert Report.read(path.parent / "report.json") == sample.report()
    assert len(list(path.parent.iterdir())) == 4  # no temporary file stays


def test_plots_of_an_earlier_report_are_deleted(tmp_path: Path) -> None:
    write_html(sample.timed_report(), tmp_path)
    (tmp_path / "own.png").write_bytes(b"a file of the user")
    assert (tmp_path / "tpot_by_k_2.png").is_file()
    write_html(sample.report(), tmp_path)
    assert sorted(path.stem for path in tmp_path.glob("*.png")) == [
        "acceptance_by_position_1", "acceptance_by_position_2", "own",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [sample.baseline()],
        [sample.row(**sample.NOT_TIMED)],
        [sample.row(**sample.NOTHING_DRAFTED)],
    ],
    ids=["empty", "baseline only", "not timed", "nothing drafted"],
)
def test_partial_reports_still_make_a_page(rows: list, tmp_path: Path) -> None:
    shown = Page(write_html(sample.report(rows), tmp_path).read_text(encoding="utf-8")).text
    assert "None" not in shown
    assert "nan" not in shown.lower().split()


def test_every_section_is_on_the_page_with_its_cells() -> None:
    shown = sections(sample.report())
    text = page(sample.report()).text
    for section in shown:
        lines = [line.cells for line in section.table.lines] if section.table else []
        for words in (section.title, *section.text, *(cell for line in lines for cell in line)):
            assert " ".join(words.split()) in text
    assert text.index("Conditions") < text.index("Warnings") < text.index("Measurements")
