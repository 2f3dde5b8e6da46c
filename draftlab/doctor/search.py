"""Trying readings: all single ones, then others on top of the best."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from draftlab.doctor.findings import ScoredReading
from draftlab.doctor.head_variant import Reading
from draftlab.doctor.hypotheses import hypotheses
from draftlab.doctor.hypothesis import MARGIN, About, Hypothesis
from draftlab.doctor.score import Score
from draftlab.progress import Monitor

POOR = 1.5  # AL below which a reading may hide a second mistake


@dataclass(frozen=True)
class Trial:
    """A reading, the mistakes it undoes (none: as stored), and how it fits.

    `over` is the stored reading's score; None for the stored reading itself.
    """

    reading: Reading
    undone: tuple[Hypothesis, ...]
    score: Score
    over: Score | None = None

    @property
    def name(self) -> str:
        """As the table calls it."""
        return ", ".join(h.name for h in self.undone) or "as stored"

    @property
    def better(self) -> bool:
        """Whether it fits better than as stored, beyond what these prompts leave to chance."""
        if self.over is None:
            return False
        margin = max(h.margin for h in self.undone)
        return improves(self.score, self.over, margin)

    @property
    def gain(self) -> float:
        """Accepted drafts a position more than as stored."""
        return self.score.gain(self.over) if self.over is not None else 0.0

    def scored(self) -> ScoredReading:
        """For the diagnosis."""
        total = self.score.total
        likelier, interval = self.score.likelier(self.over) if self.over else (None, None)
        return ScoredReading(
            name=self.name,
            changes=[h.kind for h in self.undone],
            acceptance_length=total.acceptance_length,
            acceptance_length_ci=self.score.acceptance_interval,
            drafts=total.drafts,
            accepted=total.accepted,
            accepted_at=total.accepted_at,
            gain=self.gain if self.over else None,
            likelier=likelier,
            likelier_ci=interval,
            better=self.better,
        )


@dataclass(frozen=True)
class Trials:
    """What was tried: the stored reading; all others, best first; and the one that explains the
    head, None when none is better than as stored."""

    stored: Trial
    others: list[Trial]
    best: Trial | None


def improves(score: Score, over: Score, margin: float = MARGIN) -> bool:
    """Whether a reading accepts more by an amount worth a word, and finds the target's tokens
    likelier beyond chance."""
    return score.gain(over) >= margin and score.likelier(over)[1][0] > 0


def try_readings(
    stored: Reading, about: About, scorer: Callable[[Reading], Score], monitor: Monitor
) -> Trials:
    """Scores the stored reading, every single change, and a second where one helps or none fits."""
    base = Trial(stored, (), scorer(stored))
    singles = _extend(base, base, about, scorer, monitor, "doctor: readings")
    tried, best = list(singles), _best(singles, base)
    poor = (base.score.total.acceptance_length or 1.0) < POOR
    first = best if best is not None else max(singles, key=_gain, default=None) if poor else None
    if first is not None:
        pairs = _extend(first, base, about, scorer, monitor, "doctor: pairs of them")
        tried += pairs
        best = _best(pairs, first) or best
    explains = best if best is not None and best.better else None
    return Trials(base, sorted(tried, key=_gain, reverse=True), explains)


def _gain(trial: Trial) -> float:
    return trial.gain


def _best(trials: list[Trial], than: Trial) -> Trial | None:
    """The best of those that are better than another trial."""
    better = (t for t in trials if improves(t.score, than.score, t.undone[-1].margin))
    return max(better, key=_gain, default=None)


def _extend(
    on: Trial,
    base: Trial,
    about: About,
    scorer: Callable[[Reading], Score],
    monitor: Monitor,
    stage: str,
) -> list[Trial]:
    """Every further change of another kind on top of a trial."""
    kinds = {h.kind for h in on.undone}
    found = [h for h in hypotheses(on.reading, about) if h.kind not in kinds]
    trials = []
    for number, hypothesis in enumerate(found, 1):
        score = scorer(hypothesis.reading)
        trials.append(Trial(hypothesis.reading, (*on.undone, hypothesis), score, base.score))
        monitor.progress(stage, number, len(found), hypothesis.name)
    return trials
