"""The report in the console: its content, and that 100 columns are enough."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
from rich.console import Console

from draftlab.evaluate.results import Report
from draftlab.report import formatting as fmt
from draftlab.report import print_report
from tests.helpers import sample_report as sample


def printed(report: Report, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_report(report, console)
    return console.file.getvalue()


def lines_of(text: str, row: str) -> list[str]:
    """Return the line of a row in each table."""
    return [line for line in text.splitlines() if line.split()[:1] == [row]]


def test_every_value_of_a_row_is_shown() -> None:
    report = sample.report()
    row = report.rows[4] = report.rows[4].model_copy(update={"speedup_ci": (1.5, 1.7)})
    text = printed(report)
    figures, counters = lines_of(text, "5")
    low, high = row.acceptance_length_ci
    assert f"{row.acceptance_length:.2f} [{low:.2f}, {high:.2f}]" in figures
    assert f" {1 + sum(row.expected_acceptance):.2f} " in figures
    assert " ".join(f"{a / row.drafts:.2f}" for a in row.accepted_at) in figures
    assert f"{row.speedup:.2f}× [1.50, 1.70]" in figures
    assert figures.split()[1:5] == ["chain", "4", "0.8", "on"]
    low, high = row.tpot_ms_ci
    assert f"{row.tpot_ms:.2f} [{low:.2f}, {high:.2f}]" in counters
    assert " 31.42 " in counters
    assert counters.split()[-6:] == [
        "0.10", "64", "8,192", f"{row.drafts:,}", f"{row.draft_tokens:,}", f"{row.accepted:,}",
    ]  # fmt: skip


def test_a_row_without_a_drafter_shows_no_acceptance() -> None:
    figures, counters = lines_of(printed(sample.report()), "1")
    assert figures.split() == ["1", "none", "–", "0", "–", "–", "–", "–", "–"]
    assert "9.84 [9.71, 9.99]" in counters
    assert counters.split()[-3:] == ["–", "–", "–"]


def test_vllms_default_is_marked_and_explained() -> None:
    text = printed(sample.report())
    assert lines_of(text, "2*")  # T = 0: draft probabilities play no part
    assert lines_of(text, "4*")
    assert lines_of(text, "5")
    assert lines_of(text, "1")
    assert fmt.DEFAULT_NOTE in text
    only_probs = sample.report([sample.row(temperature=0.8, draft_probs=True)])
    assert fmt.DEFAULT_NOTE not in printed(only_probs)


def test_conditions_are_stated_once_when_shared() -> None:
    text = " ".join(printed(sample.report()).split())
    for condition in (
        "Target draftlab-embedded-12m (c0ffee12c0ff)",
        "head runs/quickstart/head",
        "trained K 5",
        "engine draftlab-eager 0.1.0",
        "device cpu (2 threads)",
        "dtype float32",
        "batch 1",
        "suite embedded/held-out (sha256 9f2c1e6a9f2c)",
        "template 5d41402a5d41",
        "max tokens 128",
        "seed 0",
        "timed at batch 1, prompts 6, tokens 64, threads 1",
    ):
        assert text.count(condition) >= 1, condition
    assert text.count("float32") == 1


def test_conditions_that_differ_get_a_column() -> None:
    rows = [sample.baseline(batch=8), sample.row(batch=8), sample.row(batch=1, head="other/head")]
    text = printed(sample.report(rows))
    *_, first = lines_of(text, "1")
    *_, second = lines_of(text, "2*")
    *_, third = lines_of(text, "3*")
    assert first.split() == ["1", "–", "8"]
    assert second.split() == ["2*", "runs/quickstart/head", "8"]
    assert third.split() == ["3*", "other/head", "1"]
    assert "batch 8" not in text


def test_warnings_come_last_and_markup_is_text() -> None:
    few, odd = "6 prompts are few [bold]", "[/] odd"
    rows = [sample.row(warnings=[few, odd, few], head="[red]h[/red]"), sample.row(warnings=[few])]
    text = printed(sample.report(rows))
    assert "[red]h[/red]" in text
    tail = text.splitlines()[-2:]
    assert " ".join(tail[0].split()) == "warning, rows 1, 2: 6 prompts are few [bold]"
    assert " ".join(tail[1].split()) == "warning, row 1: [/] odd"


def test_the_first_table_names_the_heads() -> None:
    rows = [sample.baseline(), sample.row(head="quickstart"), sample.row(head="reference")]
    text = printed(sample.report(rows))
    assert [lines_of(text, mark)[0].split()[1] for mark in ("1", "2*", "3*")] == [
        "none", "quickstart", "reference",
    ]  # fmt: skip
    assert len(lines_of(text, "2*")) == 2  # no third table repeats it
    assert fmt.HEAD_NOTES["reference"] in " ".join(text.split())
    assert fmt.HEAD_NOTES["reference"] not in " ".join(printed(sample.report()).split())


def test_the_first_table_names_the_engines() -> None:
    rows = [sample.row(), sample.row(engine="vllm (V1, cpu)", expected_acceptance=None)]
    text = printed(sample.report(rows))
    assert [lines_of(text, mark)[0].split()[1] for mark in ("1*", "2*")] == [
        "draftlab-eager", "vllm",
    ]  # fmt: skip
    assert "vllm (V1, cpu) 0.1.0" in text  # in full among the conditions that differ


def test_batches_and_advice() -> None:
    report = sample.timed_report()
    text = printed(report)
    timing = report.rows[1].timings[1]
    low, high = timing.speedup_ci
    batches = [line for line in lines_of(text, "2*") if line.split()[1] == "8"]
    assert batches[0].split()[-4:] == [
        f"{timing.throughput_tok_s:.0f}", f"{timing.speedup:.2f}×", f"[{low:.2f},", f"{high:.2f}]",
    ]  # fmt: skip
    assert f"{timing.ttft_ms:.2f}" in batches[0].split()
    words = " ".join(text.split())
    first = report.adviser["advice"][0]
    assert f"advice, T = 0: {first['text']}" in words
    assert words.count("advice, ") == 2  # one a batch; the other settings are on the page
    assert max(map(len, text.splitlines())) <= 100
    once = sample.report()
    assert "advice" not in printed(once)
    assert "tokens/s" not in printed(once)


def test_without_times_there_are_no_columns_of_times() -> None:
    rows = [sample.baseline(**sample.NOT_TIMED), sample.row(**sample.NOT_TIMED)]
    text = printed(sample.report(rows))
    for name in ("TPOT", "TTFT", "speed-up"):
        assert name in printed(sample.report())
        assert name not in text


def test_the_legend_explains_only_what_is_shown() -> None:
    assert "expected AL" in printed(sample.report())
    assert "expected" not in printed(sample.report([sample.baseline(), sample.row()]))


@pytest.mark.parametrize("k", [1, 4, 8])
def test_hundred_columns_are_enough(k: int) -> None:
    """Chain and parallel heads, with and without a baseline."""
    wide = {"temperature": 1.25, "k": k, "speedup_ci": (1.5, 1.7)}
    rows = [
        sample.baseline(temperature=1.25, output_tokens=1_000_000, tpot_ms=123.4),
        sample.row(keep=0.9, **wide),
        sample.row(draft_probs=True, head="a/very-long-name" * 9, drafter="parallel", **wide),
    ]
    for shown in (rows, rows[1:]):
        text = printed(sample.report(shown))
        assert max(map(len, text.splitlines())) <= 100
        assert "…" not in text.replace("1…K", "")
        figures = lines_of(text, f"{len(shown) - 1}*")[0]
        low, high = rows[1].acceptance_length_ci
        assert f"{rows[1].acceptance_length:.2f} [{low:.2f}, {high:.2f}]" in figures
        assert "[1.50, 1.70]" in figures


def test_missing_values_are_dashes() -> None:
    bare = sample.row(
        **sample.NOT_TIMED
        | sample.NOTHING_DRAFTED
        | {"k_trained": None, "acceptance_length_ci": (float("nan"), float("nan"))}
    )
    figures, counters = lines_of(printed(sample.report([bare])), "1*")
    assert figures.split() == ["1*", "chain", "4", "0", "–", "–", "–"]
    assert counters.split()[:2] == ["1*", "0.24"]
    assert "nan" not in printed(sample.report([bare])).lower()


def test_an_empty_report_is_stated() -> None:
    assert "nothing was evaluated" in printed(sample.report([]))


def test_the_console_imports_no_large_library() -> None:
    code = "import sys, draftlab.report; print({'torch', 'matplotlib', 'scipy'} & set(sys.modules))"
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert output.strip() == "set()"
