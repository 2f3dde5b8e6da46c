"""The verdict: one sentence, and the findings that follow from the scores.

It depends on the files, the target and its prompts alone, so that a head and its export have the
same one. With fewer prompts it claims less: "undecided" where they cannot tell.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from draftlab.doctor.diagnosis import Diagnosis, Finding, ScoredVariant, State, fault, note
from draftlab.doctor.hypotheses import Hypothesis
from draftlab.doctor.score import Score, needed_prompts, student_interval
from draftlab.engine.counters import Counters
from draftlab.formatting import count_text
from draftlab.intervals import share_interval
from draftlab.report.formatting import with_interval

MARGIN = 0.05
"""Accepted drafts per step that a variant must gain."""
NEXT_POSITION_MARGIN = 0.5
"""The same with features of the next position. They determine the first draft nearly, so that a
head trained on them is nearly always right, and any other gains a little."""
MIN_FIRST_ACCEPTED = 0.4
"""Share of first drafts that a trained head has accepted. Published heads reach 0.6 to 0.8 at
temperature 0; below 0.4 a step with one draft writes fewer than 1.4 tokens."""
MIN_OF_TRAINING = 0.5
"""Share of the accuracy that training's validation measured at the first draft."""
LEVEL = 0.99
"""Of the interval of the share of first drafts that are accepted."""
MAX_MORE = 1000
"""More prompts than this are not asked for."""

TOO_FEW = "not enough prompts"
IDENTITY = ("target", "tokenizer", "template")
"""Kinds of findings that explain why no variant of a head fits."""


@dataclass(frozen=True)
class VariantResult:
    """The score of a hypothesis's variant with its gain, or that of the head as stored."""

    hypothesis: Hypothesis | None
    score: Score
    gain: float = 0.0
    interval: tuple[float, float] | None = None

    @property
    def better(self) -> bool:
        """Whether it fits better than the stored head, by its margin and not by chance."""
        row, interval = self.hypothesis, self.interval
        margin = NEXT_POSITION_MARGIN if row and row.variant.lag < 0 else MARGIN
        return bool(row and interval and interval[0] > 0 and self.gain >= margin)

    def scored(self) -> ScoredVariant:
        """Return its part of the diagnosis."""
        total, row = self.score.total, self.hypothesis
        return ScoredVariant(
            name=row.name if row else "as stored",
            kind=row and row.kind,
            acceptance_length=total.acceptance_length,
            acceptance_length_ci=self.score.acceptance_interval,
            drafts=total.drafts,
            accepted=total.accepted,
            accepted_at=total.accepted_at,
            gain=self.gain if row else None,
            gain_ci=self.interval,
            better=self.better,
        )


@dataclass(frozen=True)
class VariantSearch:
    """The scores of the stored head and of all other variants, the best first."""

    stored: VariantResult
    others: list[VariantResult]

    @property
    def best(self) -> VariantResult | None:
        """The variant that explains the head; None: none is better than the stored head."""
        return next((result for result in self.others if result.better), None)

    @property
    def missing_prompts(self) -> int:
        """Number of further prompts without which no variant is told from the stored head."""
        needed = needed_prompts(len(self.others)) if self.others else 0
        return max(needed - self.stored.score.num_prompts, 0)


@dataclass(frozen=True)
class FirstDrafts:
    """The first drafts of steps that the target accepts.

    Attributes:
        share: of `drafts`. interval: of the share, over prompts. num_prompts: their number.
    """

    share: float
    interval: tuple[float, float]
    drafts: int
    num_prompts: int

    @classmethod
    def of(cls, counters: tuple[Counters, ...]) -> FirstDrafts:
        """Return those of each prompt's counters.

        The interval is the union of Student's over prompts, which fails where all are alike, and of
        Wilson's over drafts, which takes them for independent.
        """
        drafts = np.array([c.drafts for c in counters], dtype=float)
        accepted = np.array([c.accepted_at[0] if c.accepted_at else 0 for c in counters], float)
        total, hits = int(drafts.sum()), int(accepted.sum())
        share = hits / max(total, 1)
        low, high = share_interval(hits, total, level=LEVEL)
        errors = (accepted - share * drafts) / max(drafts.mean(), 1) if len(drafts) else drafts
        over_prompts = student_interval(share, errors, LEVEL) or (0.0, 1.0)
        ends = min(low, over_prompts[0]), max(high, over_prompts[1])
        return cls(share, (max(ends[0], 0.0), min(ends[1], 1.0)), total, len(counters))

    @property
    def more_prompts(self) -> str:
        """Return about how many further prompts would bring the interval off the bound."""
        distance = abs(self.share - MIN_FIRST_ACCEPTED)
        width = max(self.interval[1] - self.share, self.share - self.interval[0])
        more = self.num_prompts * ((width / max(distance, 1e-9)) ** 2 - 1)
        if more > MAX_MORE:
            return "the share is too near to that for any number of prompts"
        return f"some {count_text(max(math.ceil(more), 1), 'more prompt')} would tell"

    def __str__(self) -> str:
        low, high = self.interval
        return (
            f"{self.share:.0%} [{low:.0%}, {high:.0%}] of {self.drafts:,} first drafts are accepted"
        )


def make_diagnosis(
    head: str,
    target: str,
    findings: list[Finding],
    *,
    layout: str,
    conditions: dict[str, Any] | None = None,
    search: VariantSearch | None = None,
    provenance: dict[str, Any] | None = None,
) -> Diagnosis:
    """Return the diagnosis.

    Args:
        findings: of the files.
        search: the scored variants; None: the head could not be scored.
        provenance: of the head's training, whose accuracy the scores are compared with.
    """
    verdict, best = "", search and search.best
    if search is not None and best is not None and (row := best.hypothesis) is not None:
        effect = f"{al(best).removeprefix('AL ')} so"
        verdict = f"it was trained with {row.name}; {al(search.stored)} as stored, {effect}"
        # The scores say the same about d2t as the files do, with figures.
        findings = [f for f in findings if f.kind != "d2t" or row.kind != "d2t"]
        findings = [fault(row.kind, verdict, row.do), *findings]
    elif search is not None and (score := score_finding(search, provenance or {})):
        causes = [f for f in findings if f.kind in IDENTITY and f.severity == "fault"]
        named = bool(causes) and score.severity == "fault"
        verdict = f"{causes[0].what}; {al(search.stored)}" if named else score.what
        findings = [*findings, score]
    faults = [f for f in findings if f.severity == "fault"]
    if not faults:
        state: State = "undecided" if verdict or search is None else "healthy"
        verdict = verdict or _healthy_verdict(search)
    else:
        state = "weak" if {f.kind for f in faults} == {"weak"} else "faulty"
        undecided = any(f.kind == TOO_FEW for f in findings)
        if undecided or not verdict:
            accepted = f"; {al(search.stored)} all the same" if search and not verdict else ""
            verdict = faults[0].what + accepted
        if len(faults) > 1:
            verdict += f" (and {len(faults) - 1} more)"
    return Diagnosis(
        healthy=state == "healthy",
        state=state,
        verdict=verdict,
        head=head,
        layout=layout,
        target=target,
        conditions=conditions or {},
        findings=findings,
        readings=[result.scored() for result in (search.stored, *search.others)] if search else [],
    )


def _healthy_verdict(search: VariantSearch | None) -> str:
    if search is None:
        return "no fault found in the files; the head was not scored"
    score = search.stored.score
    shown = with_interval(score.total.acceptance_length, score.acceptance_interval)
    ends = [r.interval[1] for r in search.others if r.interval]
    return (
        f"AL {shown} as stored, and none of {len(ends)} other variants "
        f"accepts {max([*ends, MARGIN]):.2f} drafts a step more"
    )


def al(result: VariantResult) -> str:
    """Return its acceptance length, such as "AL 2.77"."""
    return f"AL {with_interval(result.score.total.acceptance_length)}"


def score_finding(search: VariantSearch, provenance: dict[str, Any]) -> Finding | None:
    """Return what the scores of a head say of which no variant fits better; None: it is healthy.

    The head is weak if significantly fewer of its first drafts are accepted than
    `MIN_FIRST_ACCEPTED`, and healthy if significantly more are. If neither can be told, or the
    prompts are too few to compare the variants, the finding is a note.

    Args:
        provenance: of the head's training, from draftlab.json; it explains a weak head.
    """
    first = FirstDrafts.of(search.stored.score.counters)
    what = f"{first} ({al(search.stored)})"
    if missing := search.missing_prompts:
        return note(
            TOO_FEW,
            f"not enough prompts: {count_text(missing, 'more prompt')} at least would tell "
            f"{count_text(len(search.others), 'other variant')} from chance; {what}",
            f"give --max-prompts {first.num_prompts + missing} or more, and --prompts with as many",
        )
    what += f", where {MIN_FIRST_ACCEPTED:.0%} are expected of a trained head"
    if first.interval[0] >= MIN_FIRST_ACCEPTED:
        return None
    if first.interval[1] >= MIN_FIRST_ACCEPTED:
        return note(
            TOO_FEW, f"not enough prompts: {what}; {first.more_prompts}", "give more: --max-prompts"
        )
    best = max((r.score.total.acceptance_length or 1.0 for r in search.others), default=1.0)
    trained = _training_accuracy(provenance)
    if trained is None:
        return fault(
            "weak",
            f"{what}; {len(search.others)} other variants reach AL {best:.2f} at most",
            "it is another target's head, one for prompts of another kind (--prompts), hardly "
            "trained, or broken in training (answers that are not the target's own, a wrong loss "
            "mask)",
        )
    effort = ", ".join(
        f"{value:,} {unit}"
        for key, unit in (("steps", "steps"), ("tokens_seen", "tokens"))
        if isinstance(value := provenance.get(key), int)
    )
    return fault(
        "weak",
        f"{what}; training measured {trained:.0%}" + (f" after {effort}" if effort else ""),
        "look for prompts of another kind than it was trained on, another target, or weights that "
        "were changed since"
        if first.interval[1] < MIN_OF_TRAINING * trained
        else "train it longer or on more data",
    )


def _training_accuracy(provenance: dict[str, Any]) -> float | None:
    """Return the share of first drafts that training's validation measured as right."""
    validation = provenance.get("validation")
    accuracy = validation.get("accuracy") if isinstance(validation, dict) else None
    first = accuracy[0] if isinstance(accuracy, list) and accuracy else None
    return float(first) if isinstance(first, int | float) else None
