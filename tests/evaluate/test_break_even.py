"""Chain against parallel heads: the break-even K of known steps and acceptance, and its report."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from draftlab.evaluate.adviser import advise
from draftlab.evaluate.results import Report, Row
from draftlab.evaluate.speedup_model import Probe
from draftlab.report import break_even as break_even_text
from draftlab.report.html import render_html
from draftlab.report.plot_times import tpot_by_k
from draftlab.report.table import print_report
from tests.helpers import sample_report as sample
from tests.helpers.sample_report import with_timing


def chain_step(k: int) -> float:
    return 10.0 + 2.0 * k


def parallel_step(k: int) -> float:
    return 13.0 + 0.1 * k


def rows(keep: float = 0.7, max_k: int = 6) -> list[Row]:
    """Return a chain accepted with 0.8 at each position and a parallel head with `keep`."""
    pairs = [sample.baseline()]
    for k in (1, max_k):
        chain = sample.row(k=k, keep=0.8, head="chained")
        parallel = sample.row(k=k, keep=keep, head="at once", drafter="parallel")
        pairs += [with_timing(chain, chain_step(k)), with_timing(parallel, parallel_step(k))]
    return pairs


def tokens_per_step(counted: list[Row], kind: str, k: int) -> float:
    """Return the tokens of a step, between K = 1 and 6 by linear interpolation."""
    one, six = (next(r for r in counted if (r.k, r.drafter) == (i, kind)) for i in (1, 6))
    low, high = one.counters.acceptance_at[0], six.counters.acceptance_at
    shares = [row.tokens_per_step / row.acceptance_length for row in (one, six)]
    weight = (k - 1) / 5
    length = 1 + low + weight * (high[0] - low) + sum(high[1:k])
    return length * (shares[0] + weight * (shares[1] - shares[0]))


def comparisons(rows: list[Row]) -> list[dict[str, Any]]:
    adviser = advise(rows)
    assert adviser is not None
    return adviser["break_even"]


def test_the_k_from_which_parallel_is_faster() -> None:
    counted = rows()
    chain_tpot, parallel_tpot = (
        [step(k) / tokens_per_step(counted, kind, k) for k in range(1, 7)]
        for step, kind in ((chain_step, "chain"), (parallel_step, "parallel"))
    )
    faster = [p < c for p, c in zip(parallel_tpot, chain_tpot, strict=True)]
    assert faster == sorted(faster)  # a single crossing
    assert set(faster) == {False, True}
    (pair,) = comparisons(rows())
    assert (pair["chain"], pair["parallel"], pair["batch"]) == ("chained", "at once", 1)
    assert pair["k"] == faster.index(True) + 1
    assert [p["chain_tpot_ms"] for p in pair["points"]] == pytest.approx(chain_tpot)
    assert [p["parallel_tpot_ms"] for p in pair["points"]] == pytest.approx(parallel_tpot)
    for point in pair["points"]:
        k = point["k"]
        # but for truncated tokens, the ratio of the step times
        assert point["needed"] == pytest.approx(parallel_step(k) / chain_step(k), rel=0.02)
        assert (point["share"] > point["needed"]) == faster[k - 1]
    assert f"from K = {pair['k']} on" in pair["text"]
    assert f"parallel {min(parallel_tpot):.2f} ms a token" in pair["text"]


def test_a_chain_that_is_always_faster() -> None:
    (pair,) = comparisons(rows(keep=0.2))
    assert pair["k"] is None
    assert "the chain is faster at the same K, up to K = 6" in pair["text"]


def test_one_drafter_or_different_conditions_are_not_compared() -> None:
    warm = [r.model_copy(update={"temperature": 0.8}) if r.head == "at once" else r for r in rows()]
    chains = [row for row in rows() if row.drafter != "parallel"]
    for uncomparable in (warm, chains):
        assert comparisons(uncomparable) == []
        assert "Chain and parallel" not in page(sample.with_adviser(uncomparable))


def test_a_parallel_head_timed_at_one_k_has_constant_steps() -> None:
    """A chain head would need a second step time."""
    row = with_timing(sample.row(k=4, keep=0.6, head="h", drafter="parallel"), 13.0)
    (advice,) = advise([row])["advice"]
    assert [p["step_ms"] for p in advice["predictions"]] == [13.0] * 4
    one = with_timing(sample.row(k=1, keep=0.6, head="h", drafter="parallel"), 10.0)
    (advice,) = advise([row], [Probe(row.suite, row.engine, "h", 0.0, False, 1, one.timings[0])])[
        "advice"
    ]
    assert [p["step_ms"] for p in advice["predictions"]] == pytest.approx([10.0, 11.0, 12.0, 13.0])


@pytest.fixture
def report() -> Report:
    return sample.with_adviser(rows())


def page(report: Report) -> str:
    return render_html(report, []).replace("&#39;", "'").replace("\xa0", " ")


def test_page_and_console_show_the_comparison(report: Report) -> None:
    pair = report.adviser["break_even"][0]
    html = page(report)
    for text in (
        "Chain and parallel at the same K",
        pair["text"],
        f"{pair['k']} (break-even)",
        '<td class="left">at once</td><td class="left">parallel</td>',
        '<td class="left">chained</td><td class="left">chain</td>',
    ):
        assert text in html
    console = Console(width=160, file=io.StringIO())
    print_report(report, console)
    text = " ".join(console.file.getvalue().split())
    assert "chained against at once, T = 0, batch 1" in text
    assert "drafter" in text
    assert break_even_text.lines(report)[0][1] == pair["text"]
    (figure,) = tpot_by_k(report)
    labels = {text.get_text() for text in figure.legends[0].get_texts()}
    assert {"chained, chain", "at once, parallel"} <= labels


def test_times_to_first_token_are_shown_side_by_side() -> None:
    timed = []
    for row in rows():
        row = row.model_copy(update={"timings": []})
        for batch in (1, 8) if row.k else ():
            ttft = 100.0 * row.k + batch + (row.head == "at once")
            row = with_timing(row, 12.0 + row.k, batch, ttft_ms=ttft)
        timed.append(row)
    report = sample.with_adviser(timed)
    ttfts = [[row["ttfts"] for row in table["rows"]] for table in break_even_text.tables(report)]
    untimed = [["–", "–"]] * 4
    assert ttfts == [
        [["101.00", "102.00"], *untimed, ["601.00", "602.00"]],
        [["108.00", "109.00"], *untimed, ["608.00", "609.00"]],
    ]
    html = page(report)
    assert "<th>TTFT ms parallel</th>" in html
    assert "<td>608.00</td><td>609.00</td>" in html


def test_without_times_only_acceptance_is_compared() -> None:
    untimed = [row.model_copy(update=sample.NOT_TIMED | {"timings": []}) for row in rows()]
    warm = [r.model_copy(update={"temperature": 0.8}) for r in untimed if r.drafter == "chain"]
    report = sample.report([*untimed, *warm])
    length = {(row.drafter, row.k): row.acceptance_length for row in untimed}
    shares = [f"{length['parallel', k] / length['chain', k]:.2f}" for k in (1, 6)]
    ((title, text),) = break_even_text.lines(report)
    assert title == "chained against at once, T = 0"
    assert f"{shares[0]} of the chain's AL at K = 1, {shares[1]} at K = 6" in text
    (table,) = break_even_text.tables(report)
    assert [row["share"] for row in table["rows"]] == shares
    html = page(report)
    assert text in html
    assert "needed" not in html
    assert "<h2>Times</h2>" not in html


@pytest.mark.parametrize("timed", [True, False])
def test_heads_are_compared_on_one_suite(timed: bool) -> None:
    """Each suite has a sentence with its own shares and its own times."""
    by_suite = {}
    for suite, keep, ttft in (("easy", 0.7, 1.0), ("hard", 0.3, 2.0)):
        changes = {"suite": f"folder/{suite}"} | ({} if timed else sample.NOT_TIMED)
        by_suite[suite] = []
        for row in rows(keep):
            timings = [one.model_copy(update={"ttft_ms": ttft}) for one in row.timings if timed]
            by_suite[suite].append(row.model_copy(update=changes | {"timings": timings}))
    report = sample.with_adviser([row for members in by_suite.values() for row in members])
    batch = ", batch 1" if timed else ""
    lines, tables = break_even_text.lines(report), break_even_text.tables(report)
    assert len(lines) == len(tables) == 2
    for (title, text), table, (suite, members) in zip(lines, tables, by_suite.items(), strict=True):
        alone = sample.with_adviser(members)
        assert title == f"chained against at once, {suite}, T = 0{batch}"
        assert text == table["text"] == break_even_text.lines(alone)[0][1]
        assert table["rows"] == break_even_text.tables(alone)[0]["rows"]
