"""The figures of a report's sections, which every renderer shows."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from draftlab.engine.counters import COUNTER_FIELDS
from draftlab.evaluate.results import CategoryResult, Lossless, Report, SelfCheck, speed
from draftlab.report.console import print_sections
from draftlab.report.section import Section
from draftlab.report.sections import of_head, sections
from tests.helpers import sample_report as sample


def section(report: Report, title: str) -> Section:
    return next(one for one in sections(report) if one.title.startswith(title))


def cells(report: Report, title: str) -> list[list[str]]:
    """Return the cells of the table of a section."""
    return [list(line.cells) for line in section(report, title).table.lines]


def test_the_fastest_k_of_each_head_temperature_and_kind_of_drafting_is_marked() -> None:
    report = sample.timed_report()
    lines = section(report, "Measurements").table.lines
    marked = [line.cells[:3] for line in lines if line.style == "best"]
    best = {
        max((r for r in report.rows if r.k and (r.temperature, r.draft_probs) == mode), key=speed).k
        for mode in ((0.0, False), (0.8, False), (0.8, True))
    }
    assert marked == [
        [t, str(k), mode]
        for t, mode in (("0", "argmax"), ("0.8", "argmax"), ("0.8", "sampled"))
        for k in best
    ]
    once = section(sample.report(), "Measurements").table.lines
    assert not [line for line in once if line.style == "best"]


def test_acceptance_by_position_shows_conditional_and_expected_too() -> None:
    report = sample.report()
    row = report.rows[3]
    unconditional, conditional, expected = cells(report, "Acceptance by draft position")[2:5]
    a = row.accepted_at
    assert unconditional[:2] == ["T = 0.8, argmax drafts", "unconditional"]
    assert unconditional[3] == f"{a[1] / row.drafts:.3f}\n{a[1]:,} / {row.drafts:,}"
    assert conditional[3] == f"{a[1] / a[0]:.3f}"
    assert expected[2:] == [f"{e:.3f}" for e in row.expected_acceptance]


def test_counters_and_losslessness_are_shown() -> None:
    report = sample.report()
    report.rows[1].lossless = Lossless(level="L2", test="tokens equal", p_value=None, n=64)
    report.rows[4].lossless = Lossless(level="L1", test="G-test", p_value=0.314159, n=200_000)
    plain, row = report.rows[3], report.rows[1]
    rows = cells(report, "Raw counters")
    assert rows[1][1:] == [
        "64", "8,192", f"{row.drafts:,}", f"{row.draft_tokens:,}", f"{row.accepted:,}", "0",
        str(row.truncated_tokens), "1.000", "L2: tokens equal, n = 64",
    ]  # fmt: skip
    assert rows[2][2:6] == [f"{plain.output_tokens:,}", "–", "–", "–"]
    assert rows[4][-1] == "L1: G-test, p = 0.314, n = 200,000"


def test_the_advisers_predictions() -> None:
    three = [sample.with_timing(sample.row(k=k), 10.0 + k) for k in (1, 3, 5)]
    report = sample.with_adviser(three)
    advice = report.adviser["advice"][0]
    rows = cells(report, "Predictions of every K")
    best = advice["best_k"]
    assert [row[1] for row in rows] == [f"{k}{' (best)' * (k == best)}" for k in range(6)]
    assert rows[2][5].startswith("predicted ")
    predicted = advice["predictions"][2]
    low, high = predicted["speedup_ci"]
    assert rows[3][5:] == [
        f"{predicted['speedup']:.2f}× [{low:.2f}, {high:.2f}]",
        f"{predicted['timed_speedup']:.2f}×",
        f"{predicted['left_out_speedup']:.2f}×",
        f"{100 * predicted['error']:+.1f} %",
    ]
    assert f"{report.adviser['check']['text']}." in section(report, "Predictions of every K").text
    assert cells(report, "How many drafts?")[0][1] == advice["text"]


def test_the_self_check_is_shown_with_the_expected_acceptance() -> None:
    failed = SelfCheck(z=[0.3, -5.2, 1.0, None], p_value=8e-7, passed=False)
    greedy = SelfCheck(z=[None] * 4, p_value=1.0, passed=True)
    tables = [
        cells(sample.report([sample.row(temperature=0.8, self_check=one)]), "Acceptance by draft")
        for one in (failed, greedy)
    ]
    assert tables[0][2][1] == "expected\nself-check FAILED, p = 8e-07"
    assert tables[0][2][3].endswith("\nz = -5.2")
    assert "z" not in tables[0][2][5]
    assert tables[1][2][1] == "expected\nbookkeeping passed, accepted = expected"


def test_certificates_have_their_own_sections() -> None:
    """They are not repeated in the environment."""
    report = sample.report()
    lines = ["G = 63.1", "p = 1e-9 <b>"]
    report.environment["certificates"] = {
        "reference": {"level": "L1", "passed": False, "faults": [], "lines": lines}
    }
    assert section(report, "Losslessness certificate of reference: L1, FAILED").text == lines
    names = [name for name, _ in cells(report, "Environment")]
    assert names == ["python", "torch", "transformers", "cpu.model", "cpu.threads"]


@pytest.mark.parametrize("prompts_equal", [1.0, 0.9, None])
def test_equal_tokens_are_stated_for_all_k_at_once(prompts_equal: float | None) -> None:
    rows = [sample.row(k=k, prompts_equal=prompts_equal) for k in (2, 4)]
    title = "What the evaluation shows about the output"
    text = [f"T = 0, K = 2, 4, float32, draftlab-eager: tokens of {prompts_equal or 0:.1%} of 64 "
            "prompts equal those of decoding without drafts"] * bool(prompts_equal)  # fmt: skip
    not_tested = "T > 0: not tested (`draftlab eval --certify` tests it)"
    assert section(sample.report(rows), title).text == [*text, not_tested]


@pytest.mark.parametrize(
    ("heads", "ks"), [(["mine"], [1, 3, 5]), (["runs/quickstart/head", "rival"], [1, 3, 5, 7])]
)
def test_categories_have_a_column_for_every_k(heads: list[str], ks: list[int]) -> None:
    """A console of 80 columns shows them."""
    shared = {*COUNTER_FIELDS, "output_tokens", "acceptance_length", "acceptance_length_ci"}
    rows = []
    for head in heads:
        for k in ks:
            row = sample.row(head=head, k=k)
            own = row.model_dump(include=shared - {"k"}) | {"prompts": 64, "speedup": 1 + k / 10}
            own["speedup_ci"] = (1.01, 1.99)
            row.categories = [CategoryResult(category="up to 512 tokens", **own)]
            rows.append(row)
    report = sample.report([*rows, sample.row(head=heads[0], temperature=0.8, k=7)])
    table = section(report, "By category").table
    best = max(rows, key=speed)
    others = [k for k in ks if k != best.k]
    names = [f"K = {k}" for k in others]
    assert [one.name for one in table.columns[-len(others) :]] == names
    assert len(table.lines) == len(heads)
    for line in table.lines:
        assert f"K = {best.k}" in line.cells[0]
        assert list(line.cells[-len(others) :]) == [f"{1 + k / 10:.2f}×" for k in others]
    console = Console(file=io.StringIO(), width=80)
    print_sections([section(report, "By category")], console)
    assert all(text in console.file.getvalue() for text in line.cells[-len(others) :])


def test_a_report_of_one_head_has_nothing_of_others() -> None:
    rows = [
        sample.with_timing(sample.row(head=head, k=k), 10.0 + k)
        for head in ("mine", "rival")
        for k in (1, 3)
    ]
    report = sample.with_adviser([sample.baseline(), *rows])
    report.environment["certificates"] = {
        "rival": {"level": "L1", "passed": True, "faults": [], "lines": ["G = 63.1"]}
    }
    shown = sections(of_head(report, "mine"))
    assert "rival" not in str(shown)
    assert "mine" in str(shown)
