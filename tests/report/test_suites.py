"""One table of several suites: the rows of a setting together, one row per suite."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from draftlab.errors import UserError
from draftlab.evaluate.results import Report
from draftlab.report.console import print_sections
from draftlab.report.sections import suite_sections
from tests.helpers import sample_report as sample


def of_suite(name: str, **changes: Any) -> Report:
    """Return a report of a chain and a parallel head at two values of K."""
    drafted = [
        sample.row(k=k, suite=name, suite_sha256=name * 9, head=head, drafter=drafter, **changes)
        for head, drafter in (("chained", "chain"), ("at once", "parallel"))
        for k in (3, 5)
    ]
    return sample.report([sample.baseline(suite=name, suite_sha256=name * 9), *drafted])


def printed(*reports: Report, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_sections(suite_sections(reports), console)
    return console.file.getvalue()


def test_each_setting_has_a_row_for_each_suite() -> None:
    one, two = of_suite("mt-bench"), of_suite("data/gsm8k.jsonl", keep=0.4)
    text = printed(one, two)
    table = text.split("Measurements")[1].splitlines()
    lines = [line for line in table if "mt-bench" in line or "gsm8k" in line]
    assert [line.split()[:4] for line in lines[2:]] == [
        [*head.split(), kind, suite, "0"][:4]
        for head, kind in (("chained", "chain"), ("at once", "parallel"))
        for _ in "35"
        for suite in ("mt-bench", "gsm8k")
    ]
    assert ["mt-bench" in line for line in lines] == [True, False] * 5
    for rows, printed_rows in ((one.rows, lines[::2]), (two.rows, lines[1::2])):
        for row, line in zip(rows, printed_rows, strict=True):
            assert f"{row.tpot_ms:.2f} " in line
            assert f"{row.ttft_ms:.2f} " in line
            if row.acceptance_length:
                assert f" {row.acceptance_length:.2f} [" in line
                assert f" {row.speedup:.2f}×" in line
    assert "data/" not in text.split("Measurements")[1]
    assert max(map(len, text.splitlines())) <= 100
    assert "…" not in text.replace("1…K", "")


def test_other_prompts_of_one_suite_have_the_start_of_their_hash() -> None:
    one, two = of_suite("embedded:heldout"), of_suite("embedded:heldout")
    other = [row.model_copy(update={"suite_sha256": "4b346e3e7419"}) for row in two.rows]
    text = printed(one, two.model_copy(update={"rows": other}), width=80)
    conditions, table = text.split("Measurements")
    assert "embedded:heldout (sha256 of its tokens 4b346e3e7419)" in " ".join(conditions.split())
    assert sum(" 4b346e " in line for line in table.splitlines()) == len(other)


def test_different_targets_and_empty_reports_are_refused() -> None:
    one = of_suite("a")
    other = one.model_copy(update={"target": {"name": "other", "fingerprint": "0" * 64}})
    with pytest.raises(UserError, match=r"expected reports of one target, found .*, other \(0000"):
        printed(one, other)
    with pytest.raises(UserError, match="expected reports with rows, found none"):
        printed(sample.report([]), sample.report([]))
