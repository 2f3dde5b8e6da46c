"""Chain against parallel heads: the break-even K of known steps and acceptance, and its report."""

from __future__ import annotations

from typing import Any

from draftlab.evaluate.adviser import advise
from draftlab.evaluate.results import Row
from draftlab.report.sections import sections
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
    k = pair["k"]
    assert f"from K = {k} on: parallel has " in pair["text"]
    assert f"needs {parallel_step(k) / chain_step(k):.2f}" in pair["text"]
    assert f": {min(parallel_tpot):.2f} ms" in pair["text"]
    assert f": {min(chain_tpot):.2f} ms" in pair["text"]


def test_a_chain_that_is_always_faster() -> None:
    (pair,) = comparisons(rows(keep=0.2))
    assert pair["k"] is None
    assert "the chain is faster at the same K, up to K = 6" in pair["text"]


def test_one_drafter_or_different_conditions_are_not_compared() -> None:
    warm = [r.model_copy(update={"temperature": 0.8}) if r.head == "at once" else r for r in rows()]
    chains = [row for row in rows() if row.drafter != "parallel"]
    for uncomparable in (warm, chains):
        assert comparisons(uncomparable) == []
        titles = [one.title for one in sections(sample.with_adviser(uncomparable))]
        assert "Chain and parallel at the same K" not in titles


def test_a_parallel_head_timed_at_one_k_has_constant_steps() -> None:
    """A chain head would need a second step time."""
    row = with_timing(sample.row(k=4, keep=0.6, head="h", drafter="parallel"), 13.0)
    (advice,) = advise([row])["advice"]
    assert [p["step_ms"] for p in advice["predictions"]] == [13.0] * 4
