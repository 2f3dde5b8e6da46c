"""The search for the variant of a head that fits its target: single changes, then pairs.

A hypothesis is a mistake that is made between training and serving, with the variant of the head
that corrects it. Hypotheses are a function of a variant, so a second mistake is found by proposing
hypotheses about the best variant of the first search.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from draftlab.doctor import input_hypotheses as inputs
from draftlab.doctor import weight_hypotheses as weights
from draftlab.doctor.findings import ScoredVariant
from draftlab.doctor.head_variant import HeadVariant
from draftlab.doctor.hypothesis import MARGIN, Hypothesis, HypothesisContext, Propose
from draftlab.doctor.score import Score
from draftlab.progress import Monitor

POOR_ACCEPTANCE_LENGTH = 1.5  # below it a variant may hide a second mistake

PROPOSALS: tuple[Propose, ...] = (
    inputs.boundaries,
    inputs.features,
    inputs.prompts,
    weights.norms,
    weights.slots,
    weights.rope,
    weights.layouts,
    weights.vocabularies,
    weights.masks,
)


def hypotheses(variant: HeadVariant, context: HypothesisContext) -> list[Hypothesis]:
    """Return every hypothesis that the head's shapes allow."""
    return [hypothesis for propose in PROPOSALS for hypothesis in propose(variant, context)]


@dataclass(frozen=True)
class VariantResult:
    """A variant, the hypotheses that led to it (none: the head as stored), and its score.

    `baseline` is the score of the stored head; None for the stored head itself.
    """

    variant: HeadVariant
    hypotheses: tuple[Hypothesis, ...]
    score: Score
    baseline: Score | None = None

    @property
    def name(self) -> str:
        """The row of the table."""
        return ", ".join(h.name for h in self.hypotheses) or "as stored"

    @property
    def better(self) -> bool:
        """True if it fits significantly better than the stored head."""
        if self.baseline is None:
            return False
        return improves(self.score, self.baseline, max(h.margin for h in self.hypotheses))

    @property
    def gain(self) -> float:
        """Accepted drafts per position above the stored head's."""
        return self.score.gain(self.baseline) if self.baseline is not None else 0.0

    def scored(self) -> ScoredVariant:
        """Return its part of the diagnosis."""
        total, baseline = self.score.total, self.baseline
        likelier, interval = self.score.likelihood_gain(baseline) if baseline else (None, None)
        return ScoredVariant(
            name=self.name,
            changes=[h.kind for h in self.hypotheses],
            acceptance_length=total.acceptance_length,
            acceptance_length_ci=self.score.acceptance_interval,
            drafts=total.drafts,
            accepted=total.accepted,
            accepted_at=total.accepted_at,
            gain=self.gain if baseline else None,
            likelier=likelier,
            likelier_ci=interval,
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


def improves(score: Score, baseline: Score, margin: float = MARGIN) -> bool:
    """Return whether a variant accepts at least `margin` drafts per step more, and finds the
    target's tokens significantly likelier."""
    return score.gain(baseline) >= margin and score.likelihood_gain(baseline)[1][0] > 0


def search_variants(
    stored: HeadVariant,
    context: HypothesisContext,
    scorer: Callable[[HeadVariant], Score],
    monitor: Monitor,
) -> VariantSearch:
    """Score the stored head and every single change.

    A second change is tried on top of the best one, also where none helps but the head is poor.
    """

    def extend(result: VariantResult, stage: str) -> list[VariantResult]:
        """Score every further change of another kind on top of a variant."""
        kinds = {h.kind for h in result.hypotheses}
        proposed = [h for h in hypotheses(result.variant, context) if h.kind not in kinds]
        results = []
        for number, hypothesis in enumerate(proposed, 1):
            changes, score = (*result.hypotheses, hypothesis), scorer(hypothesis.variant)
            results.append(VariantResult(hypothesis.variant, changes, score, base.score))
            monitor.progress(stage, number, len(proposed), hypothesis.name)
        return results

    base = VariantResult(stored, (), scorer(stored))
    results = extend(base, "doctor: variants")
    best = start = _best(results, base)
    if best is None and (base.score.total.acceptance_length or 1.0) < POOR_ACCEPTANCE_LENGTH:
        start = max(results, key=_gain, default=None)
    if start is not None:
        pairs = extend(start, "doctor: pairs of variants")
        results += pairs
        best = _best(pairs, start) or best
    explanation = best if best is not None and best.better else None
    return VariantSearch(base, sorted(results, key=_gain, reverse=True), explanation)


def _gain(result: VariantResult) -> float:
    return result.gain


def _best(results: list[VariantResult], baseline: VariantResult) -> VariantResult | None:
    """Return the best of the variants that improve on `baseline`."""
    better = (r for r in results if improves(r.score, baseline.score, r.hypotheses[-1].margin))
    return max(better, key=_gain, default=None)
