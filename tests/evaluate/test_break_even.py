"""Chain against parallel: the break-even K from known steps and acceptance, and how it is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from draftlab.evaluate.adviser import StepPoint, advise
from draftlab.evaluate.results import Report, Row
from draftlab.report import same_k
from draftlab.report.html import render_html
from draftlab.report.plots import figures
from draftlab.report.table import print_report
from tests.evaluate.test_adviser import PLAIN, timed
from tests.helpers import sample_report as sample


def chain_step(k: int) -> float:
    return 10.0 + 2.0 * k


def parallel_step(k: int) -> float:
    return 13.0 + 0.1 * k


def rows(keep: float = 0.7, deepest: int = 6) -> list[Row]:
    """A chain accepted with 0.8 at each position, a parallel head with `keep`."""
    made = [sample.baseline()]
    for k in (1, deepest):
        made.append(timed(sample.row(k=k, keep=0.8, head="chained"), chain_step(k)))
        at_once = sample.row(k=k, keep=keep, head="at once", drafter="parallel")
        made.append(timed(at_once, parallel_step(k)))
    return made


def only(found: list[Row]) -> dict[str, Any]:
    adviser = advise(found)
    assert adviser is not None
    (one,) = adviser["break_even"]
    return one


def test_the_k_from_which_parallel_is_faster() -> None:
    found = rows()
    chain, parallel = (
        next(r for r in found if r.k == 6 and r.drafter == kind).counters.acceptance_at
        for kind in ("chain", "parallel")
    )
    chain_tpot, parallel_tpot = (
        [step(k) / (1 + sum(at[:k])) for k in range(1, 7)]
        for step, at in ((chain_step, chain), (parallel_step, parallel))
    )
    faster = [p < c for p, c in zip(parallel_tpot, chain_tpot, strict=True)]
    assert faster == sorted(faster)  # a single crossing
    assert True in faster
    assert False in faster
    one = only(found)
    assert (one["chain"], one["parallel"], one["batch"]) == ("chained", "at once", 1)
    assert one["k"] == faster.index(True) + 1
    assert [p["chain_tpot_ms"] for p in one["points"]] == pytest.approx(chain_tpot)
    assert [p["parallel_tpot_ms"] for p in one["points"]] == pytest.approx(parallel_tpot)
    for point in one["points"]:
        k = point["k"]
        assert point["needed"] == pytest.approx(parallel_step(k) / chain_step(k))
        assert (point["share"] > point["needed"]) == faster[k - 1]
    assert f"from K = {one['k']} on" in one["text"]
    assert f"parallel {min(parallel_tpot):.2f} ms a token" in one["text"]


def test_a_chain_that_stays_ahead() -> None:
    one = only(rows(keep=0.2))
    assert one["k"] is None
    assert "the chain is faster at the same K, up to K = 6" in one["text"]


def test_other_conditions_are_not_compared() -> None:
    found = [
        r.model_copy(update={"temperature": 0.8}) if r.head == "at once" else r for r in rows()
    ]
    adviser = advise(found)
    assert adviser is not None
    assert adviser["break_even"] == []
    alone = advise([r for r in rows() if r.drafter != "parallel"])
    assert alone is not None
    assert alone["break_even"] == []


def test_a_parallel_head_timed_at_one_k_is_flat() -> None:
    """A chain timed so would need a second point."""
    row = timed(sample.row(k=4, keep=0.6, head="h", drafter="parallel"), 13.0)
    (advice,) = advise([row])["advice"]
    assert [p["step_ms"] for p in advice["predictions"]] == [13.0] * 4
    assert PLAIN < 13.0
    (advice,) = advise([row], [StepPoint(row.engine, "h", 1, k, 12.0 + k) for k in (1, 4)])[
        "advice"
    ]
    assert [p["step_ms"] for p in advice["predictions"]] == pytest.approx([10.0, 11.0, 12.0, 13.0])


@pytest.fixture
def report() -> Report:
    found = rows()
    return sample.report(found).model_copy(update={"adviser": advise(found)})


def test_the_report_has_them_side_by_side(report: Report, tmp_path: Path) -> None:
    one = report.adviser["break_even"][0]
    page = render_html(report, {})
    assert "Chain and parallel at the same K" in page
    assert one["text"] in page.replace("&#39;", "'")
    assert f"{one['k']} (break-even)" in page
    assert "at once (parallel)" in page
    assert "chained (chain)" in page
    console = Console(width=160, record=True, file=open(tmp_path / "table", "w"))  # noqa: SIM115
    print_report(report, console)
    text = " ".join(console.export_text().split())
    assert "chained against at once, T = 0, batch 1" in text
    assert "drafter" in text
    assert same_k.lines(report)[0][1] == one["text"]


def test_times_to_first_token_stand_side_by_side() -> None:
    found = []
    for row in rows():
        for batch in (1, 8) if row.k else ():
            row = timed(row, 12.0 + row.k, batch=batch)
        firsts = [
            one.model_copy(update={"ttft_ms": 100.0 * row.k + one.batch + (row.head == "at once")})
            for one in row.timings[-2:]
        ]
        found.append(row.model_copy(update={"timings": firsts}))
    report = sample.report(found).model_copy(update={"adviser": advise(found)})
    told = [[row["ttfts"] for row in table["rows"]] for table in same_k.tables(report)]
    untimed = [["–", "–"]] * 4
    assert told == [
        [["101.00", "102.00"], *untimed, ["601.00", "602.00"]],
        [["108.00", "109.00"], *untimed, ["608.00", "609.00"]],
    ]
    page = render_html(report, {})
    assert "<th>TTFT ms parallel</th>" in page
    assert "<td>608.00</td><td>609.00</td>" in page


def test_without_times_the_shares_stand_side_by_side() -> None:
    untimed = {"tpot_ms": None, "speedup": None, "timings": []}
    found = [row.model_copy(update=untimed) for row in rows()]
    warm = [row.model_copy(update={"temperature": 0.8}) for row in found if row.drafter == "chain"]
    report = sample.report([*found, *warm]).model_copy(update={"adviser": None})
    length = {(row.drafter, row.k): row.acceptance_length for row in found}
    shares = [f"{length['parallel', k] / length['chain', k]:.2f}" for k in (1, 6)]
    (line,) = same_k.lines(report)
    assert line == (
        "chained against at once, T = 0",
        f"parallel has {shares[0]} of the chain's AL at K = 1, {shares[1]} at K = 6; too little "
        "was timed to say which is faster",
    )
    (table,) = same_k.tables(report)
    assert [row["share"] for row in table["rows"]] == shares
    page = render_html(report, {})
    assert line[1] in page.replace("&#39;", "'")
    assert "needed" not in page
    assert "<h2>Times</h2>" not in page


def test_the_plot_of_tpot_has_both(report: Report) -> None:
    (axes,) = figures(report)["tpot_by_k"].axes
    labels = {t.get_text() for t in axes.get_legend().get_texts()}
    assert {"chained, chain", "at once, parallel"} <= labels


def test_a_report_of_one_kind_has_no_such_table() -> None:
    found = [row for row in rows() if row.drafter != "parallel"]
    alone = sample.report(found).model_copy(update={"adviser": advise(found)})
    assert "Chain and parallel" not in render_html(alone, {})
