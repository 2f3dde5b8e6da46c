"""The report in the console: its content, and that 100 columns are enough."""

from __future__ import annotations

import io
import re
import subprocess
import sys

import pytest
from rich.console import Console

from draftlab.evaluate.results import Report
from draftlab.report import formatting as fmt
from draftlab.report.console import print_sections
from draftlab.report.sections import sections
from tests.helpers import sample_report as sample


def printed(report: Report, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_sections(sections(report), console)
    return console.file.getvalue()


def table(text: str) -> list[str]:
    """Return the lines of the table below its heading."""
    _, _, below = text.partition("─── \n")
    return re.split(r"\n *\n", below)[0].rstrip().splitlines()


def test_a_row_has_its_conditions_acceptance_and_times_in_one_line() -> None:
    report = sample.report()
    row = report.rows[4] = report.rows[4].model_copy(update={"speedup_ci": (1.5, 1.7)})
    lines = table(printed(report, width=120))
    assert len(lines) == 5
    low, high = row.acceptance_length_ci
    assert lines[4].split() == [
        "0.8", "4", "sampled", f"{row.acceptance_length:.2f}", f"[{low:.2f},", f"{high:.2f}]",
        *(f"{a / row.drafts:.2f}" for a in row.accepted_at), f"{row.tpot_ms:.2f}", "31.42",
        f"{row.speedup:.2f}×", "[1.50,", "1.70]", "0.10",
    ]  # fmt: skip


def test_the_verdict_is_above_the_table() -> None:
    head, _, _ = printed(sample.report()).partition("───")
    assert head.split("\n")[1] == "Draft head head for target draftlab-embedded-12m"
    assert head.split("\n")[2].startswith("At T = 0 and K = 4, head")


def test_conditions_are_stated_once_when_shared() -> None:
    text = " ".join(printed(sample.report()).split())
    for condition in (
        "target draftlab-embedded-12m (c0ffee12c0ff)",
        "dtype float32",
        "suite embedded/held-out (sha256 of its tokens 9f2c1e6a9f2c)",
    ):
        assert text.count(condition) == 1, condition


def test_warnings_come_last_and_once_and_markup_is_text() -> None:
    few, odd = "6 prompts are few [bold]", "[/] odd"
    rows = [sample.row(warnings=[few, odd, few], head="[red]h[/red]"), sample.row(warnings=[few])]
    text = printed(sample.report(rows))
    assert "[red]h[/red]" in text
    assert [line.rstrip() for line in text.splitlines()[-2:]] == [
        "-  6 prompts are few [bold]",
        "-  [/] odd (T = 0, [red]h[/red])",
    ]
    console = Console(file=io.StringIO(), width=100)
    said = [f"a head: {few}", "a full disk"]
    print_sections(sections(sample.report(rows), said=said), console)
    assert console.file.getvalue().count(few) == 1
    assert "a full disk" in console.file.getvalue()


def test_the_table_names_the_heads() -> None:
    rows = [sample.baseline(), sample.row(head="quickstart"), sample.row(head="reference")]
    text = printed(sample.report(rows))
    assert [line.split()[0] for line in table(text)] == ["0", "quickstart", "reference"]
    assert fmt.HEAD_NOTES["reference"] in " ".join(text.split())
    assert fmt.HEAD_NOTES["reference"] not in " ".join(printed(sample.report()).split())


def test_batches_and_advice() -> None:
    report = sample.timed_report()
    text = printed(report)
    timing = report.rows[1].timings[1]
    low, high = timing.speedup_ci
    first_batch, second_batch = table(text)[2:4]
    assert first_batch.split()[:2] == ["0", "2"]
    assert second_batch.split() == [
        "8", f"{timing.tpot_ms:.2f}", f"{timing.ttft_ms:.2f}", f"{timing.speedup:.2f}×",
        f"[{low:.2f},", f"{high:.2f}]",
    ]  # fmt: skip
    words = " ".join(text.split())
    advice = report.adviser["advice"]
    assert f"How many drafts? T = 0 {advice[0]['text']}" in words
    assert f"T = 0.8, sampled drafts {advice[-1]['text']}" in words
    assert words.count("best K = ") == len(advice) == 6
    assert max(map(len, text.splitlines())) <= 100
    once = sample.report()
    assert "How many drafts?" not in printed(once)
    assert "batch" not in printed(once).partition("Measurements")[2]


def test_missing_values_are_left_out() -> None:
    bare = sample.row(
        **sample.NOT_TIMED
        | sample.NOTHING_DRAFTED
        | {"k_trained": None, "acceptance_length_ci": (float("nan"), float("nan"))}
    )
    assert table(printed(sample.report([bare])))[0].split() == ["0", "4", "0.24"]
    assert "nan" not in printed(sample.report([bare])).lower()


def test_an_empty_report_is_stated() -> None:
    assert "nothing was evaluated" in printed(sample.report([]))


def test_the_console_imports_no_large_library() -> None:
    code = "import sys, draftlab.report; print({'torch', 'matplotlib', 'scipy'} & set(sys.modules))"
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert output.strip() == "set()"


TIMES = {"tpot_ms": 19.84, "ttft_ms": 131.42, "speedup": 1.26, "speedup_ci": (1.13, 1.4)}
KINDS = [("argmax", False), ("sampled", True)]
NARROW = {
    "kinds of drafting": [
        sample.row(k=5, temperature=0.8, draft_probs=on, **TIMES) for _, on in KINDS
    ],
    "heads": [sample.row(head=name, k=3, **TIMES) for name in ("a head", "another one")],
    "all": [
        sample.with_timing(
            sample.row(head=head, engine=engine, k=5, temperature=0.8, draft_probs=on),
            40.0,
            batch,
            **TIMES,
        )
        for head in ("runs/quickstart/head", "another one")
        for engine in ("draftlab", "vllm (V1, cpu)")
        for _, on in KINDS
        for batch in (1, 8)
    ],
}


@pytest.mark.parametrize("width", [80, 160])
@pytest.mark.parametrize("name", NARROW)
def test_a_console_has_whole_figures(name: str, width: int) -> None:
    rows = NARROW[name]
    text = printed(sample.report(rows), width)
    assert all(len(line) <= width for line in text.splitlines())
    lines, values = "\n".join(table(text)), ["1.26×", "[1.13, 1.40]"]
    values += [f"{rows[0].acceptance_length:.2f}"]
    values += ["[{:.2f}, {:.2f}]".format(*rows[0].acceptance_length_ci)]
    assert [lines.count(value) for value in values] == [len(rows)] * 4
    shown = " ".join(f"{a / rows[0].drafts:.2f}" for a in rows[0].accepted_at)
    assert (shown in lines) == (width > 80)
