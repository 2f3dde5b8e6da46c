"""The verdict: one sentence, and the findings that follow from the scores."""

from __future__ import annotations

from typing import Any

from draftlab.doctor.findings import Diagnosis, Finding, fault, note
from draftlab.doctor.search import VariantResult, VariantSearch
from draftlab.evaluate.statistics import share_interval

MIN_FIRST_ACCEPTED = 0.2  # a trained head has more of its first drafts accepted
MIN_OF_TRAINING = 0.5  # share of the accuracy that training measured
HARDLY = "hardly trained"

IDENTITY = ("target", "tokenizer", "template", "embeddings", "lm_head")
"""Kinds of findings that explain why no variant of a head fits."""


def make_diagnosis(
    head: str,
    target: str,
    findings: list[Finding],
    *,
    layout: str = "unknown",
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
    verdict, num_mentioned = "", 1
    if search is not None and search.best is not None:
        verdict, num_mentioned = explanation(search), len(search.best.hypotheses)
        corrected = {h.kind for h in search.best.hypotheses}
        # The scores say the same about d2t as the files do, with figures.
        rest = [f for f in findings if f.kind != "d2t" or f.kind not in corrected]
        findings = [*_hypothesis_findings(search), *rest]
    elif search is not None:
        sound = all(f.severity == "note" for f in findings)
        if poor := poor_finding(search.stored, search.others, provenance or {}, sound=sound):
            findings = [*findings, poor]
            causes = [f for f in findings if f.kind in IDENTITY and f.severity == "fault"]
            if poor.severity == "fault":
                verdict = f"{causes[0].what}; {al(search.stored)}" if causes else poor.what
    faults = [f for f in findings if f.severity == "fault"]
    # A change by hand also makes draftlab.json differ from config.json: the change says more.
    faults.sort(key=lambda f: f.kind == "config.json")
    if not faults:
        verdict = _healthy_verdict(search)
        verdict += f"; {HARDLY}" * any(f.kind == HARDLY for f in findings)
    else:
        verdict = verdict or faults[0].what
        if len(faults) > num_mentioned:
            verdict += f" (and {len(faults) - num_mentioned} more)"
    return Diagnosis(
        healthy=not faults,
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
    interval = search.stored.score.acceptance_interval
    shown = f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else ""
    return (
        f"{al(search.stored)}{shown} as stored, and none of {len(search.others)} other variants "
        "fits better"
    )


def al(result: VariantResult) -> str:
    """Return its acceptance length, such as "AL 2.77"."""
    length = result.score.total.acceptance_length
    return "AL –" if length is None else f"AL {length:.2f}"


def explanation(search: VariantSearch, mistake: str | None = None) -> str:
    """Return "the ids look like outputs of layers; AL 1.04 as stored, 2.77 shifted by one".

    Args:
        mistake: the mistake to name; None: all that the best variant corrects.
    """
    assert search.best is not None
    mistake = mistake or " and ".join(h.mistake for h in search.best.hypotheses)
    corrections = " and ".join(h.correction for h in search.best.hypotheses)
    best = al(search.best).removeprefix("AL ")
    return f"{mistake}; {al(search.stored)} as stored, {best} {corrections}"


def _hypothesis_findings(search: VariantSearch) -> list[Finding]:
    """Return a finding for each mistake that the best variant corrects."""
    assert search.best is not None
    return [fault(h.kind, explanation(search, h.mistake), h.do) for h in search.best.hypotheses]


def poor_finding(
    stored: VariantResult, others: list[VariantResult], provenance: dict[str, Any], *, sound: bool
) -> Finding | None:
    """Return a finding if every variant of the head drafts significantly too badly.

    It is a note, and no fault, where training measured as little.

    Args:
        sound: whether no fault was found in its files.
    """
    total = stored.score.total
    accepted = total.accepted_at[0] if total.accepted_at else 0
    rate, highest = accepted / max(total.drafts, 1), share_interval(accepted, total.drafts)[1]
    best = max((r.score.total.acceptance_length or 1.0 for r in others), default=1.0)
    rest = f"({al(stored)}); {len(others)} other variants reach AL {best:.2f} at most"
    trained = _training_accuracy(provenance)
    if trained is not None and highest < MIN_OF_TRAINING * trained:
        return fault(
            "nothing fits",
            f"training measured {trained:.0%} of first drafts right, here {rate:.0%} are {rest}",
            "look for prompts of another kind than it was trained on, another target, or "
            "weights that were changed since",
        )
    if trained is not None and max(trained, rate) < MIN_FIRST_ACCEPTED:
        return note(
            HARDLY,
            f"{rate:.0%} of first drafts are accepted ({al(stored)}), and training measured "
            f"{trained:.0%}",
            "train it longer: its files and its config are sound"
            if sound
            else "correct the faults first; then train it longer",
        )
    if trained is None and highest < MIN_FIRST_ACCEPTED:
        return fault(
            "nothing fits",
            f"{rate:.0%} of first drafts are accepted {rest}",
            "it is another target's head, hardly trained, or broken in training (answers that "
            "are not the target's own, a wrong loss mask)",
        )
    return None


def _training_accuracy(provenance: dict[str, Any]) -> float | None:
    """Return the share of first drafts that training's validation measured as right."""
    validation = provenance.get("validation")
    accuracy = validation.get("accuracy") if isinstance(validation, dict) else None
    first = accuracy[0] if isinstance(accuracy, list) and accuracy else None
    return float(first) if isinstance(first, int | float) else None
