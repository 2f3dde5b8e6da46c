"""From which K on a parallel head beats a chain: the adviser's predictions side by side.

A chain's step costs a pass of the head for every draft, a parallel head's one pass whatever K; the
chain sees its own earlier drafts, and so is accepted longer. At the same K

    TPOT(parallel) ≤ TPOT(chain)  ⟺  AL(parallel) / AL(chain) ≥ step(parallel) / step(chain):

the ratio of the measured steps says which share of the chain's AL a parallel head needs there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from draftlab.evaluate.adviser import Advice, Prediction  # which makes use of this file


@dataclass(frozen=True)
class SameK:
    """Both at K drafts a step.

    Attributes:
        needed: the share of the chain's AL that makes the parallel head as fast.
        share: the one it has.
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
    """A chain and a parallel head under the same conditions.

    Attributes:
        chain, parallel: the heads' names.
        k: the smallest from which on the parallel head takes less time a token than the chain at
            the same K, as far as both were advised on; None: it does not.
        text: in one line.
    """

    engine: str
    chain: str | None
    parallel: str | None
    temperature: float
    draft_probs: bool
    batch: int
    k: int | None
    text: str
    points: tuple[SameK, ...]


def break_even(advice: Sequence[Advice]) -> list[BreakEven]:
    """Every chain beside every parallel head that was advised on under the same conditions."""
    pairs = [
        (chain, parallel)
        for chain in advice
        for parallel in advice
        if (chain.drafter, parallel.drafter) == ("chain", "parallel")
        and _conditions(chain) == _conditions(parallel)
    ]
    return [_compare(chain, parallel) for chain, parallel in pairs]


def _conditions(advice: Advice) -> tuple[object, ...]:
    return advice.engine, advice.temperature, advice.draft_probs, advice.batch


def _compare(chain: Advice, parallel: Advice) -> BreakEven:
    points = tuple(
        _same_k(one, other)
        for one, other in zip(chain.predictions, parallel.predictions, strict=False)
    )
    behind = [p.k for p in points if p.parallel_tpot_ms >= p.chain_tpot_ms]
    first = max(behind, default=0) + 1
    k = first if first <= points[-1].k else None
    return BreakEven(
        chain.engine,
        chain.head,
        parallel.head,
        chain.temperature,
        chain.draft_probs,
        chain.batch,
        k,
        _text(k, points, chain, parallel),
        points,
    )


def _same_k(chain: Prediction, parallel: Prediction) -> SameK:
    assert chain.k == parallel.k  # predictions begin with K = 1 and leave none out
    return SameK(
        chain.k,
        chain.acceptance_length,
        parallel.acceptance_length,
        chain.step_ms,
        parallel.step_ms,
        chain.tpot_ms,
        parallel.tpot_ms,
        parallel.step_ms / chain.step_ms,
        parallel.acceptance_length / chain.acceptance_length,
    )


def _text(k: int | None, points: Sequence[SameK], chain: Advice, parallel: Advice) -> str:
    """ "parallel from K = 3 on (…), there with 0.94 of the chain's AL, where 0.97 is needed"."""
    deepest = points[-1]
    if k is None:
        text = (
            f"the chain is faster at the same K, up to K = {deepest.k}: parallel has "
            f"{deepest.share:.2f} of its AL there and needs {deepest.needed:.2f}"
        )
    else:
        at = points[k - 1]
        text = (
            f"parallel is faster at the same K from K = {k} on: it needs {at.needed:.2f} of the "
            f"chain's AL there and has {at.share:.2f}"
        )
    best = [min(one.predictions, key=lambda p: p.tpot_ms) for one in (chain, parallel)]
    told = [f"{p.tpot_ms:.2f} ms a token (K = {p.k})" for p in best]
    return f"{text}; predicted at their best K's: chain {told[0]}, parallel {told[1]}"
