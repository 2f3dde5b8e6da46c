"""The search for the variant of a head that fits its target: single changes, then pairs.

A hypothesis is a mistake that is made between training and serving, with the variant of the head
that corrects it. Hypotheses are a function of a variant, so a second mistake is found by proposing
hypotheses about the best variant of the first search.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from draftlab.doctor.diagnosis import ScoredVariant
from draftlab.doctor.hypotheses import HeadVariant, Hypothesis, HypothesisContext, hypotheses
from draftlab.doctor.score import Comparison, Score
from draftlab.progress import Monitor

POOR_ACCEPTANCE_LENGTH = 1.5  # below it a variant may hide a second mistake


@dataclass(frozen=True)
class VariantResult:
    """A variant, the hypotheses that led to it (none: the head as stored), and its score.

    `gain` compares it with the stored head; None for the stored head itself.
    """

    variant: HeadVariant
    hypotheses: tuple[Hypothesis, ...]
    score: Score
    gain: Comparison | None = None
    likelier: float | None = None

    @property
    def name(self) -> str:
        """The row of the table."""
        return ", ".join(h.name for h in self.hypotheses) or "as stored"

    @property
    def better(self) -> bool:
        """True if it fits significantly better than the stored head."""
        return self.gain is not None and self.gain.exceeds(max(h.margin for h in self.hypotheses))

    def scored(self) -> ScoredVariant:
        """Return its part of the diagnosis."""
        total = self.score.total
        return ScoredVariant(
            name=self.name,
            changes=[h.kind for h in self.hypotheses],
            acceptance_length=total.acceptance_length,
            acceptance_length_ci=self.score.acceptance_interval,
            drafts=total.drafts,
            accepted=total.accepted,
            accepted_at=total.accepted_at,
            gain=self.gain.gain if self.gain else None,
            gain_ci=self.gain.interval if self.gain else None,
            likelier=self.likelier,
            better=self.better,
        )


@dataclass(frozen=True)
class VariantSearch:
    """The results of a search.

    Attributes:
        stored: the head as stored.
        others: all other variants, best first.
        best: the variant that explains the head; None: none is better than the stored head.
    """

    stored: VariantResult
    others: list[VariantResult]
    best: VariantResult | None

    @property
    def missing_prompts(self) -> int:
        """Number of further prompts without which no variant is told from the stored head."""
        needed = max((r.gain.needed for r in self.others if r.gain is not None), default=0)
        return max(needed - int((self.stored.score.positions > 0).sum()), 0)

    @property
    def compared(self) -> list[Comparison]:
        """The other variants' gains over enough prompts to tell one from chance."""
        gains = [r.gain for r in self.others if r.gain is not None]
        return [g for g in gains if g.interval is not None and g.num_prompts >= g.needed]


def search_variants(
    stored: HeadVariant,
    context: HypothesisContext,
    scorer: Callable[[HeadVariant], Score],
    monitor: Monitor,
) -> VariantSearch:
    """Score the stored head and every single change.

    A second change is tried on top of the best one, also where none helps but the head is poor.
    """

    def extend(result: VariantResult, stage: str, tried: int) -> list[VariantResult]:
        """Score every further change of another kind on top of one of `tried` variants."""
        kinds = {h.kind for h in result.hypotheses}
        proposed = [h for h in hypotheses(result.variant, context) if h.kind not in kinds]
        tried, results = tried * len(proposed), []
        for number, hypothesis in enumerate(proposed, 1):
            changes, score = (*result.hypotheses, hypothesis), scorer(hypothesis.variant)
            gain, likelier = score.compare(base.score, tried), score.likelier(base.score)
            results.append(VariantResult(hypothesis.variant, changes, score, gain, likelier))
            monitor.progress(stage, number, len(proposed), hypothesis.name)
        return results

    base = VariantResult(stored, (), scorer(stored))
    results = extend(base, "doctor: variants", 1)
    best = start = max((r for r in results if r.better), key=_gain, default=None)
    if best is None and (base.score.total.acceptance_length or 1.0) < POOR_ACCEPTANCE_LENGTH:
        start = max(results, key=_gain, default=None)
    if start is not None:
        pairs = extend(start, "doctor: pairs of variants", len(results))
        results += pairs
        better = [r for r in pairs if r.better and _improves(r, start, len(pairs))]
        best = max(better, key=_gain, default=best)
    return VariantSearch(base, sorted(results, key=_gain, reverse=True), best)


def _gain(result: VariantResult) -> float:
    return result.gain.gain if result.gain is not None else 0.0


def _improves(pair: VariantResult, start: VariantResult, tried: int) -> bool:
    """Return whether the second change of a pair is better than the first alone."""
    return pair.score.compare(start.score, tried).exceeds(pair.hypotheses[-1].margin)
