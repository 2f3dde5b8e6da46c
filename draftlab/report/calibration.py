"""Calibrations as sections."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from draftlab.evaluate.calibration.result import CalibratedPosition, Calibration, Saving
from draftlab.evaluate.results import Report
from draftlab.report import formatting as fmt
from draftlab.report.section import Section, filled, grouped

SHOWN_THRESHOLD = 0.2
"""Threshold of the survival that the sentence on a calibration has."""
DEFINITIONS = (
    "Position k: the probability that the first k drafts of a step are accepted, from what is "
    "known before draft k. Error: the expected calibration error, Σ n / N · |mean prediction − "
    "share accepted| over 15 bins. A perfect predictor errs too, since the steps are finite; its "
    "error is simulated. Intervals are over prompts. A draft's chance is σ(slope · s + intercept), "
    "with s the logit of its raw confidence; the calibrated probability of position k is "
    "σ(a · ln p − b · ln(1 − p) + c), with p the product of the chances up to draft k."
)


def name(report: Report, one: Calibration) -> str:
    """Return "reference, T = 0.8, sampled drafts, K = 4"; heads and K only where they differ."""
    heads = {c.head for c in report.calibrations}
    names = [one.head] * (len(heads) > 1)
    text = fmt.conditions_text(one.temperature, one.draft_probs, None, *names)
    several_k = len({c.k for c in report.calibrations}) > 1
    return text + f", K = {one.k}" * several_k


def calibration_facts(report: Report) -> list[tuple[str, str]]:
    """Return (conditions, text) for each calibration."""
    return [(name(report, one), _text(one)) for one in report.calibrations]


def _text(one: Calibration) -> str:
    worst = max(one.positions, key=lambda p: p.error_after)
    before = max(p.error_before for p in one.positions)
    (saving,) = (s for s in one.survival_savings if s.threshold == SHOWN_THRESHOLD)
    at = one.confidence_temperature
    source = one.source if at is None else f"{one.source} at T = {at:g}"
    return (
        f"the {source} errs by at most {before:.3f} before and "
        f"{worst.error_after:.3f} after calibration (a perfect predictor shows "
        f"{worst.error_perfect:.3f} there), over {one.blocks:,} steps of "
        f"{one.prompts:,} other prompts; verifying only drafts that survive "
        f"with probability {saving.threshold:g} leaves out "
        f"{_percent(saving.not_verified)} of the drafts and {_percent(saving.lost)} of the accepted"
    )


def _number(field: str, digits: int = 3) -> Callable[[CalibratedPosition], str]:
    return lambda p: fmt.number(getattr(p, field), digits)


POSITIONS: dict[str, Callable[[CalibratedPosition], str]] = {
    "steps": lambda p: f"{p.blocks:,}",
    "share accepted": lambda p: fmt.number(p.survived / p.blocks, 3),
    "error, raw": _number("error_before"),
    "error, slope and intercept": _number("error_logistic"),
    "error, calibrated": lambda p: fmt.with_interval(p.error_after, p.error_after_ci, 3),
    "error, a temperature a position": _number("error_temperature"),
    "error, one temperature": _number("error_common_temperature"),
    "error of a perfect predictor": _number("error_perfect"),
    "– at most (97.5 %)": _number("error_perfect_high"),
    "share of variance explained": _number("skill", 2),
    "slope": _number("slope", 2),
    "intercept": _number("intercept", 2),
    "a, b, c": lambda p: ", ".join(f"{value:.2f}" for value in p.beta),
    "temperature": _number("temperature", 2),
}
SAVINGS: dict[str, Callable[[Saving], str]] = {
    "threshold": lambda one: f"{one.threshold:g}",
    "drafts not verified": lambda one: _percent(one.not_verified, one.not_verified_ci),
    "accepted drafts lost": lambda one: _percent(one.lost, one.lost_ci),
}


def calibration_tables(report: Report) -> Iterator[Section]:
    """Yield the errors at each position of every calibration, and what cut-offs leave out."""
    for one in report.calibrations:
        text = (
            f"Fitted on {one.fitted_blocks:,} steps of {one.fitted_prompts:,} "
            f"prompts of {one.suite}, chosen at random with seed 0; measured on "
            f"{one.blocks:,} steps of the other {one.prompts:,}."
        )
        if one.common_temperature is not None:
            text += f" One temperature for all positions: {one.common_temperature:.2f}."
        title = f"Confidence of the drafts, {name(report, one)}"
        by_k = [(str(k), [position]) for k, position in enumerate(one.positions, 1)]
        positions = filled(grouped("k", POSITIONS, by_k))
        yield Section(title, [DEFINITIONS, text], positions, kind="folded")
        rules = (
            ("the first calibrated survival below", one.survival_savings),
            ("the first raw confidence below", one.cutoff_savings),
        )
        savings = grouped("drafts are left out from", SAVINGS, rules)
        yield Section(f"{title}: cut-offs", table=savings, kind="folded")


def _percent(share: float, interval: tuple[float, float] | None = None) -> str:
    ends = " [{:.1f}, {:.1f}]".format(*(100 * end for end in interval)) if interval else ""
    return f"{100 * share:.1f} %" + ends
