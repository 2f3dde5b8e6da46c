"""The verdict: one sentence, and the findings that follow from the scores."""

from __future__ import annotations

from typing import Any

from draftlab.doctor.findings import Diagnosis, Finding, fault
from draftlab.doctor.search import VariantResult, VariantSearch
from draftlab.evaluate.statistics import share_interval

MIN_FIRST_ACCEPTED = 0.4
"""Share of first drafts that a trained head has accepted. Published heads reach 0.6 to 0.8 at
temperature 0; below 0.4 a step with one draft writes fewer than 1.4 tokens."""
MIN_OF_TRAINING = 0.5
"""Share of the accuracy that training's validation measured at the first draft."""

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
    elif search and (weak := weak_finding(search.stored, search.others, provenance or {})):
        findings = [*findings, weak]
        causes = [f for f in findings if f.kind in IDENTITY and f.severity == "fault"]
        verdict = f"{causes[0].what}; {al(search.stored)}" if causes else weak.what
    faults = [f for f in findings if f.severity == "fault"]
    # A change by hand also makes draftlab.json differ from config.json: the change says more.
    faults.sort(key=lambda f: f.kind == "config.json")
    if not faults:
        verdict = _healthy_verdict(search)
    else:
        verdict = verdict or faults[0].what
        if len(faults) > num_mentioned:
            verdict += f" (and {len(faults) - num_mentioned} more)"
    return Diagnosis(
        healthy=not faults,
        state="healthy"
        if not faults
        else "weak"
        if {f.kind for f in faults} == {"weak"}
        else "faulty",
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


def weak_finding(
    stored: VariantResult, others: list[VariantResult], provenance: dict[str, Any]
) -> Finding | None:
    """Return a finding if the stored head is weak, and None if it is not.

    A head is weak if significantly fewer of its first drafts are accepted than `MIN_OF_TRAINING` of
    the share that its training measured, or than `MIN_FIRST_ACCEPTED`: the upper end of the 99.9 %
    interval is below the bound. It is also weak if both the training and this diagnosis measured
    less than `MIN_FIRST_ACCEPTED`, however few the drafts are.

    Args:
        stored: the head as stored. others: its variants, none of which fits better.
        provenance: of the head's training, from draftlab.json.
    """
    total = stored.score.total
    accepted = total.accepted_at[0] if total.accepted_at else 0
    rate, highest = accepted / max(total.drafts, 1), share_interval(accepted, total.drafts)[1]
    trained = _training_accuracy(provenance)
    best = max((r.score.total.acceptance_length or 1.0 for r in others), default=1.0)
    what = f"{rate:.0%} of {total.drafts:,} first drafts are accepted ({al(stored)}), where "
    rest = f"; {len(others)} other variants reach AL {best:.2f} at most"
    if trained is not None and highest < MIN_OF_TRAINING * trained:
        return fault(
            "weak",
            f"{what}training measured {trained:.0%} right{rest}",
            "look for prompts of another kind than it was trained on, another target, or "
            "weights that were changed since",
        )
    if highest >= MIN_FIRST_ACCEPTED and (
        trained is None or max(trained, rate) >= MIN_FIRST_ACCEPTED
    ):
        return None
    what += f"{MIN_FIRST_ACCEPTED:.0%} are expected of a trained head"
    if trained is None:
        return fault(
            "weak",
            what + rest,
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
        "train it longer or on more data",
    )


def _training_accuracy(provenance: dict[str, Any]) -> float | None:
    """Return the share of first drafts that training's validation measured as right."""
    validation = provenance.get("validation")
    accuracy = validation.get("accuracy") if isinstance(validation, dict) else None
    first = accuracy[0] if isinstance(accuracy, list) and accuracy else None
    return float(first) if isinstance(first, int | float) else None
