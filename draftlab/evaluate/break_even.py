"""Break-even between chain and parallel heads: from which K on is the parallel head faster?

A chain's step needs one pass of the head per draft, a parallel head's step one pass for any K. The
chain sees its own earlier drafts and is therefore accepted longer. At the same K

    TPOT(parallel) ≤ TPOT(chain)  ⟺  n(parallel) / n(chain) ≥ step(parallel) / step(chain)

with the tokens n of a step. n is AL but for truncated tokens, so the ratio of the step times is
close to the share of the chain's AL that the parallel head needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from draftlab.evaluate.adviser import Advice, Prediction  # adviser imports this module


@dataclass(frozen=True)
class KComparison:
    """A chain and a parallel head at the same K.

    Attributes:
        needed: share of the chain's AL at which the parallel head is as fast.
        share: share of the chain's AL that the parallel head has.
    """

    k: int
    chain_length: float
    parallel_length: float
    chain_step_ms: float
    parallel_step_ms: float
    chain_tpot_ms: float
    parallel_tpot_ms: float
    needed: float
    share: float


@dataclass(frozen=True)
class BreakEven:
    """The comparison of a chain and a parallel head under the same conditions.

    Attributes:
        chain, parallel: names of the heads.
        k: smallest K from which on the parallel head has the lower predicted TPOT at every K that
            both heads have; None if there is none.
        text: the result in one line.
    """

    suite: str
    engine: str
    chain: str | None
    parallel: str | None
    temperature: float
    draft_probs: bool
    batch: int
    k: int | None
    text: str
    points: tuple[KComparison, ...]


def break_even(advice: Sequence[Advice]) -> list[BreakEven]:
    """Return the comparison of every chain with every parallel head under the same conditions."""
    return [
        _compare(chain, parallel)
        for chain in advice
        for parallel in advice
        if (chain.drafter, parallel.drafter) == ("chain", "parallel")
        and _conditions(chain) == _conditions(parallel)
    ]


def _conditions(advice: Advice) -> tuple[object, ...]:
    return advice.suite, advice.engine, advice.temperature, advice.draft_probs, advice.batch


def _compare(chain: Advice, parallel: Advice) -> BreakEven:
    pairs = zip(chain.predictions, parallel.predictions, strict=False)
    points = tuple(_compare_at_k(*pair) for pair in pairs)
    slower = [p.k for p in points if p.parallel_tpot_ms >= p.chain_tpot_ms]
    first = max(slower, default=0) + 1
    k = first if first <= points[-1].k else None
    return BreakEven(
        suite=chain.suite,
        engine=chain.engine,
        chain=chain.head,
        parallel=parallel.head,
        temperature=chain.temperature,
        draft_probs=chain.draft_probs,
        batch=chain.batch,
        k=k,
        text=_text(k, points, chain, parallel),
        points=points,
    )


def _compare_at_k(chain: Prediction, parallel: Prediction) -> KComparison:
    assert chain.k == parallel.k  # predictions cover every K from 1
    share = parallel.acceptance_length / chain.acceptance_length
    return KComparison(
        k=chain.k,
        chain_length=chain.acceptance_length,
        parallel_length=parallel.acceptance_length,
        chain_step_ms=chain.step_ms,
        parallel_step_ms=parallel.step_ms,
        chain_tpot_ms=chain.tpot_ms,
        parallel_tpot_ms=parallel.tpot_ms,
        needed=share * parallel.tpot_ms / chain.tpot_ms,
        share=share,
    )


def _text(k: int | None, points: Sequence[KComparison], chain: Advice, parallel: Advice) -> str:
    """Return the result in one line, with each head's TPOT at its best K."""
    if k is None:
        last = points[-1]
        text = (
            f"the chain is faster at the same K, up to K = {last.k}: parallel has "
            f"{last.share:.2f} of its AL there and needs {last.needed:.2f}"
        )
    else:
        point = points[k - 1]
        text = (
            f"parallel is faster at the same K from K = {k} on: it needs {point.needed:.2f} of the "
            f"chain's AL there and has {point.share:.2f}"
        )
    best = [min(one.predictions, key=lambda p: p.tpot_ms) for one in (chain, parallel)]
    chain_best, parallel_best = (f"{p.tpot_ms:.2f} ms a token (K = {p.k})" for p in best)
    return f"{text}; predicted at the best K of each: chain {chain_best}, parallel {parallel_best}"
