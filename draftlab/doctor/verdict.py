"""From findings and scores to one line that says what is wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from draftlab.doctor.findings import Diagnosis, Finding
from draftlab.doctor.search import Trial, Trials
from draftlab.evaluate.statistics import share_interval

RARE = 0.2  # first drafts accepted less often than this are no head's at work
HALF = 0.5  # of what training measured
HARDLY = "hardly trained"

IDENTITY = ("target", "tokenizer", "template", "embeddings", "lm_head")
"""Kinds that explain a head that no reading fits."""


@dataclass
class Case:
    """An examination under way.

    Attributes:
        trials: the scored readings; None where the head could not be scored.
    """

    head: str
    target: str
    layout: str = "unknown"
    findings: list[Finding] = field(default_factory=list)
    conditions: dict[str, Any] = field(default_factory=dict)
    trials: Trials | None = None

    def closed(self, provenance: dict[str, Any] | None = None) -> Diagnosis:
        """The diagnosis.

        Args:
            provenance: of the head's training, whose own figures the scores are held against.
        """
        findings, readings, verdict = list(self.findings), [], ""
        if self.trials is not None:
            stored, tried, best = self.trials.stored, self.trials.others, self.trials.best
            readings = [trial.scored() for trial in (stored, *tried)]
            if best is not None:
                verdict = explained(stored, best)
                scored = {h.kind for h in best.undone}
                # What the files say of d2t, the scores say with figures.
                rest = [f for f in findings if f.kind != "d2t" or f.kind not in scored]
                findings = [*_undone(stored, best), *rest]
            elif poor := poor_finding(
                stored, tried, provenance or {}, sound=all(f.severity == "note" for f in findings)
            ):
                findings.append(poor)
                causes = [f for f in findings if f.kind in IDENTITY and f.severity == "fault"]
                if poor.severity == "fault":
                    verdict = f"{causes[0].what}; {al(stored)}" if causes else poor.what
        faults = [f for f in findings if f.severity == "fault"]
        # What was changed by hand differs from config.json too: the change says more.
        faults.sort(key=lambda f: f.kind == "config.json")
        if not verdict and faults:
            verdict = faults[0].what
        told = len(self.trials.best.undone) if self.trials and self.trials.best else 1
        if faults and len(faults) > told:
            verdict += f" (and {len(faults) - told} more)"
        if not faults:
            verdict = self._healthy()
            verdict += f"; {HARDLY}" * any(f.kind == HARDLY for f in findings)
        return Diagnosis(
            healthy=not faults,
            verdict=verdict,
            head=self.head,
            layout=self.layout,
            target=self.target,
            conditions=self.conditions,
            findings=findings,
            readings=readings,
        )

    def _healthy(self) -> str:
        if self.trials is None:
            return "no fault found in the files; the head was not scored"
        stored, tried = self.trials.stored, self.trials.others
        interval = stored.score.acceptance_interval
        between = f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else ""
        return (
            f"{al(stored)}{between} as stored, and none of {len(tried)} other readings fits better"
        )


def al(trial: Trial) -> str:
    """ "AL 2.77"."""
    found = trial.score.total.acceptance_length
    return "AL –" if found is None else f"AL {found:.2f}"


def explained(stored: Trial, best: Trial) -> str:
    """ "the ids look like outputs of layers; AL 1.04 as stored, 2.77 shifted by one"."""
    says = " and ".join(h.says for h in best.undone)
    so = " and ".join(h.so for h in best.undone)
    return f"{says}; {al(stored)} as stored, {al(best).removeprefix('AL ')} {so}"


def _undone(stored: Trial, best: Trial) -> list[Finding]:
    """A finding for each mistake that the best reading undoes."""
    return [
        Finding(
            kind=h.kind,
            what=f"{h.says}; {al(stored)} as stored, {al(best).removeprefix('AL ')} "
            + " and ".join(u.so for u in best.undone),
            do=h.do,
        )
        for h in best.undone
    ]


def poor_finding(
    stored: Trial, tried: list[Trial], provenance: dict[str, Any], *, sound: bool
) -> Finding | None:
    """A head that drafts badly however it is read, beyond chance; None where it does not.

    Where training measured as little, that is worth knowing and no fault.

    Args:
        sound: whether no fault was found in its files.
    """
    total = stored.score.total
    first = total.accepted_at[0] if total.accepted_at else 0
    rate, most = first / max(total.drafts, 1), share_interval(first, total.drafts)[1]
    best = max((t.score.total.acceptance_length or 1.0 for t in tried), default=1.0)
    other = f"; {len(tried)} other readings reach AL {best:.2f} at most"
    trained = _accuracy(provenance)
    if trained is not None and most < HALF * trained:
        return Finding(
            kind="nothing fits",
            what=f"training measured {trained:.0%} of first drafts right, here {rate:.0%} are "
            f"({al(stored)}){other}",
            do="prompts of another kind than it was trained on, another target, or weights that "
            "were changed since",
        )
    if trained is not None and max(trained, rate) < RARE:
        return Finding(
            kind=HARDLY,
            what=f"{rate:.0%} of first drafts are accepted ({al(stored)}), and training measured "
            f"{trained:.0%}",
            do="train it longer: the files and the way it is read are sound"
            if sound
            else "mend the faults first; then train it longer",
            severity="note",
        )
    if trained is None and most < RARE:
        return Finding(
            kind="nothing fits",
            what=f"{rate:.0%} of first drafts are accepted ({al(stored)}){other}",
            do="another target's head, hardly trained, or broken in training (answers that are not "
            "the target's own, a wrong loss mask)",
        )
    return None


def _accuracy(provenance: dict[str, Any]) -> float | None:
    """Of first drafts, as training's validation measured it."""
    validation = provenance.get("validation")
    found = validation.get("accuracy") if isinstance(validation, dict) else None
    first = found[0] if isinstance(found, list) and found else None
    return float(first) if isinstance(first, int | float) else None
