"""The HTML page is complete, escaped, and opens without a network."""

from __future__ import annotations

import base64
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from draftlab.evaluate.headline import speed
from draftlab.evaluate.results import Lossless, Report, SelfCheck
from draftlab.report import write_html
from draftlab.report.html import render_html
from tests.helpers import sample_report as sample

VOID = {"meta", "img", "br", "link", "input", "hr"}


class Page(HTMLParser):
    """A parser that collects attributes, words and tables, and checks that tags are balanced."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.words: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            return
        self.words.append(data)
        if "td" in self.open or "th" in self.open:
            self.tables[-1][-1][-1] += f" {data} "

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def rows(self, heading: str) -> list[list[str]]:
        """Return the body rows of the first table with a column of this heading."""
        for table in self.tables:
            cells = [[" ".join(cell.split()) for cell in row] for row in table]
            if cells and heading in cells[0]:
                return cells[1:]
        raise AssertionError(f"no table has the column {heading}")


def page(report: Report) -> Page:
    return Page(render_html(report, []))


def test_a_row_has_its_conditions_and_measured_values() -> None:
    report = sample.timed_report()
    plain, row = report.rows[3], report.rows[5]
    low, high = row.acceptance_length_ci
    times = f"{row.tpot_ms:.2f} [{row.tpot_ms_ci[0]:.2f}, {row.tpot_ms_ci[1]:.2f}]"
    rows = page(report).rows("AL")
    assert rows[5] == [
        "sampled", "0.8", "2", f"{row.acceptance_length:.2f} [{low:.2f}, {high:.2f}]", times,
        f"{row.speedup:.2f}×", "31.42", "0.10",
    ]  # fmt: skip
    assert rows[3] == ["", "0.8", "none", "", "9.84 [9.71, 9.99]", "", "29.80", "0.10"]
    counters = page(report).rows("undrafted steps")
    assert counters[5][4:6] == [f"{row.draft_tokens:,}", f"{row.accepted:,}"]
    assert counters[3][2:6] == [f"{plain.output_tokens:,}", "–", "–", "–"]


def test_cards_show_the_fastest_k_without_row_numbers() -> None:
    text = page(sample.timed_report()).text
    for label in ("T = 0, argmax drafts", "T = 0.8, argmax drafts", "T = 0.8, sampled drafts"):
        assert label in text
    row = max((r for r in sample.timed_report().rows if r.k and not r.temperature), key=speed)
    length = f"{row.acceptance_length:.2f}"
    assert f"{row.speedup:.2f}× as fast at K = {row.k}, AL {length}" in text
    many = [sample.row(temperature=t / 10) for t in range(10)]
    assert "as fast at K" not in page(sample.report(many)).text


def test_acceptance_by_position_shows_conditional_and_expected_too() -> None:
    report = sample.report()
    row = report.rows[3]
    unconditional, conditional, expected = page(report).rows("share")[3:6]
    a = row.accepted_at
    assert unconditional[0] == "T = 0.8, argmax drafts"
    assert unconditional[3] == f"{a[1] / row.drafts:.3f} {a[1]:,} / {row.drafts:,}"
    assert conditional[2] == f"{a[1] / a[0]:.3f} {a[1]:,} / {a[0]:,}"
    assert expected[1:] == [f"{e:.3f}" for e in row.expected_acceptance]


def test_rows_of_different_k_fill_one_table() -> None:
    rows = page(sample.report([sample.row(k=2), sample.row(k=5)])).rows("share")
    # the first column spans the lines of a row, so only the first line has it
    assert [len(row) for row in rows] == [7, 6, 7, 6]
    assert rows[0][4:] == ["", "", ""]


def test_counters_conditions_warnings_and_environment_are_shown() -> None:
    report = sample.report()
    report.rows[1].lossless = Lossless(level="L2", test="tokens equal", p_value=None, n=64)
    report.rows[4].lossless = Lossless(level="L1", test="G-test", p_value=0.314159, n=200_000)
    parsed, row = page(report), report.rows[1]
    assert parsed.rows("undrafted steps")[1][1:] == [
        "64", "8,192", f"{row.drafts:,}", f"{row.draft_tokens:,}", f"{row.accepted:,}", "0",
        str(row.truncated_tokens), "1.000", "L2: tokens equal, n = 64",
    ]  # fmt: skip
    assert parsed.rows("losslessness")[4][-1] == "L1: G-test, p = 0.314, n = 200,000"
    for text in (
        "the answers repeat <themselves> [often] (T = 0.8, argmax drafts)",
        "suite embedded/held-out (sha256 9f2c1e6a9f2c)",
        "cpu.model Xeon",
        "transformers 5.23.0",
        "fingerprint " + "c0ffee12" * 8,
        "acceptance length = 1 + accepted / drafts",
        "timed at batch 1, prompts 6",
    ):
        assert text in parsed.text, text


def test_times_of_every_batch() -> None:
    report = sample.timed_report()
    rows = page(report).rows("at once")
    assert [row[0] for row in rows[2:4]] == [
        "T = 0, K = 2, argmax drafts",
        "8",
    ]  # the label spans two lines
    timing = report.rows[1].timings[1]
    low, high = timing.speedup_ci
    assert rows[3] == [
        "8",
        f"{timing.tpot_ms:.2f} [{timing.tpot_ms_ci[0]:.2f}, {timing.tpot_ms_ci[1]:.2f}]",
        "11.40",
        f"{timing.speedup:.2f}× [{low:.2f}, {high:.2f}]",
        "31.40",
        f"{timing.step_ms:.2f}",
        f"{timing.floor_ms:.2f}",
        f"{timing.throughput_tok_s:.1f}",
    ]


def test_the_advisers_tables() -> None:
    report = sample.timed_report()
    advice = report.adviser["advice"][0]
    parsed = page(report)
    rows = parsed.rows("on the timed prompts")
    assert [row[0].split()[0] for row in rows] == ["0", "1", "2", "3", "4", "5"]
    assert [row[0] for row in rows if "best" in row[0]] == [f"{advice['best_k']} (best)"]
    predicted = advice["predictions"][1]
    low, high = predicted["speedup_ci"]
    assert rows[2][4:] == [
        f"{predicted['speedup']:.2f}× [{low:.2f}, {high:.2f}]",
        f"{predicted['timed_speedup']:.2f}×",
        "–",  # it cannot be predicted from K = 5 alone
        "–",
    ]
    assert rows[1][5:] == ["–", "–", "–"]  # K = 1 was not timed
    three = [sample.with_timing(sample.row(k=k), 10.0 + k) for k in (1, 3, 5)]
    checked = sample.with_adviser(three)
    predicted = checked.adviser["advice"][0]["predictions"][2]
    assert page(checked).rows("on the timed prompts")[3][5:] == [
        f"{predicted['timed_speedup']:.2f}×",
        f"{predicted['left_out_speedup']:.2f}×",
        f"{100 * predicted['error']:+.1f} %",
    ]
    for one in report.adviser["advice"]:
        assert one["text"] in parsed.text
    assert "How many drafts?" not in page(sample.report()).text


def test_the_self_check_is_shown_with_the_expected_acceptance() -> None:
    failed = SelfCheck(z=[0.3, -5.2, 1.0, None], p_value=8e-7, passed=False)
    rows = page(sample.report([sample.row(temperature=0.8, self_check=failed)])).rows("share")
    assert rows[2][0] == "expected self-check FAILED, p = 8e-07"
    assert rows[2][2].endswith("z = -5.2")
    assert "z" not in rows[2][4]
    greedy = SelfCheck(z=[None] * 4, p_value=1.0, passed=True)
    rows = page(sample.report([sample.row(temperature=0.8, self_check=greedy)])).rows("share")
    assert rows[2][0] == "expected bookkeeping passed, accepted = expected"


def test_conditions_that_differ_are_listed_by_row() -> None:
    rows = page(sample.report([sample.baseline(batch=8), sample.row(batch=1)])).rows("batch")
    assert [row[:3] for row in rows] == [["8", "0", "none"], ["1", "0", "4"]]


def test_text_from_files_is_escaped() -> None:
    evil = '<script>alert(1)</script>"><img src=x onerror=y>'
    report = sample.report([sample.row(head=evil, warnings=[evil]), sample.row(head="b")])
    report.target["name"] = evil
    report.environment[evil] = {evil: evil}
    text = render_html(report, [])
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
    assert sorted(files) == ["acceptance_by_position.png", "acceptance_length.png", "tpot.png"]
    embedded = {base64.b64decode(value.partition(",")[2]) for value in images}
    assert embedded == set(files.values())
    assert all(data.startswith(b"\x89PNG\r\n") for data in embedded)
    assert Report.read(path.parent / "report.json") == sample.report()
    assert len(list(path.parent.iterdir())) == 5  # no temporary file stays


def test_plots_of_an_earlier_report_are_deleted(tmp_path: Path) -> None:
    write_html(sample.timed_report(), tmp_path)
    (tmp_path / "own.png").write_bytes(b"a file of the user")
    assert (tmp_path / "tpot_by_k_2.png").is_file()
    write_html(sample.report(), tmp_path)
    assert sorted(path.stem for path in tmp_path.glob("*.png")) == [
        "acceptance_by_position", "acceptance_length", "own", "tpot",
    ]  # fmt: skip


def test_an_existing_report_json_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text("existing")
    write_html(sample.report([sample.baseline()]), tmp_path)
    assert (tmp_path / "report.json").read_text() == "existing"


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


def test_certificates_and_alpha_by_position_have_their_own_sections() -> None:
    """They are not repeated in the environment."""
    report = sample.report()
    assert "by position in the conversation" not in page(report).text
    filled = {"start": 256, "stop": 512, "alpha": [0.6171, None], "rows": [1200, 0]}
    empty = {"start": 0, "stop": 256, "alpha": [None, None], "rows": [0, 0]}
    report.environment["alpha_by_position"] = {"a head": [empty, filled]}
    report.environment["certificates"] = {
        "reference": {"level": "L1", "passed": False, "lines": ["G = 63.1", "p = 1e-9 <b>"]}
    }
    text = page(report).text
    for shown in ("reference: L1, FAILED", "p = 1e-9 <b>", "a head: positions", "256 – 511"):
        assert shown in text
    assert "0.617" in text
    for hidden in ("0 – 255", "alpha_by_position", "certificates"):
        assert hidden not in text


def test_a_table_that_is_cut_shows_that_it_scrolls() -> None:
    page = render_html(sample.report(), [])
    style = page[: page.index("</style>")]
    assert "overflow-x: auto" in style
    assert "local" in style  # its edges are covered by shadows
    assert "wide tables scroll sideways" in style[style.index("@media (max-width: 40rem)") :]
