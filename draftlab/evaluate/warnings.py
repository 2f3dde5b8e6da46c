"""Warnings of an evaluation, in the rows of its report.

Equal texts of several rows are printed once, so that figures of a row are left to its table.
"""

from __future__ import annotations

from draftlab.evaluate.decoding_config import NamedHead
from draftlab.evaluate.results import Row, Timing
from draftlab.evaluate.self_check import failure_message
from draftlab.evaluate.settings import EvalSettings

MIN_PROMPTS = 30
MIN_TIMED_PROMPTS = 10
SLOWDOWN = 0.995
"""A speed-up below this is a slowdown; 0.995 is still printed as 1.00."""


def suite_warnings(prompts: int, settings: EvalSettings) -> list[str]:
    """Return warnings if there are too few prompts for reliable intervals."""
    warnings = []
    if prompts < MIN_PROMPTS:
        warnings.append(
            f"few prompts ({prompts}): the intervals are unreliable (at least {MIN_PROMPTS}: "
            "eval.max_prompts, or a larger eval.suite)"
        )
    if 0 < settings.timing_prompts < MIN_TIMED_PROMPTS:
        warnings.append(
            f"few timed prompts ({settings.timing_prompts}): their intervals are too narrow "
            f"(eval.timing_prompts, at least {MIN_TIMED_PROMPTS})"
        )
    return warnings


def k_warnings(head: NamedHead, k: int) -> list[str]:
    """Return a warning if K exceeds what the head was trained for."""
    if k <= head.k_trained:
        return []
    unit = "depths" if head.drafter == "parallel" else "steps"
    return [
        f"K = {k} exceeds the {head.k_trained} {unit} of training: the head was not trained for "
        "its last drafts"
    ]


def row_warnings(row: Row) -> list[str]:
    """Return warnings about a measured row: a failed self-check, drafting that does not pay."""
    warnings = []
    if row.self_check and (failure := failure_message(row.self_check)):
        warnings.append(failure)
    for timing in row.timings:
        low, high = _interval(timing)
        if high < SLOWDOWN:
            warnings.append(f"drafting slows decoding down at batch {timing.batch}")
        elif low < SLOWDOWN:
            warnings.append(
                f"the intervals do not show whether drafting pays at batch {timing.batch}"
            )
    return warnings


def _interval(timing: Timing) -> tuple[float, float]:
    """Return the interval of the speed-up; without one, the speed-up itself or else 1."""
    point = 1.0 if timing.speedup is None else timing.speedup
    return timing.speedup_ci or (point, point)
