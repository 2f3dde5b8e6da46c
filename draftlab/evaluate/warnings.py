"""Warnings of an evaluation, in the rows of its report.

Equal texts of several rows are printed once, so that figures of a row are left to its table.
"""

from __future__ import annotations

from draftlab.evaluate.decoding_config import NamedHead
from draftlab.evaluate.results import Row, drafting_pays
from draftlab.evaluate.self_check import failure_message
from draftlab.evaluate.settings import EvalSettings
from draftlab.intervals import MIN_INTERVAL_PROMPTS
from draftlab.text.suites import Suite

MIN_PROMPTS = 30
MIN_TIMED_PROMPTS = 10


def suite_warnings(prompts: int, settings: EvalSettings) -> list[str]:
    """Return warnings if there are too few prompts for reliable intervals."""
    warnings = []
    if prompts < MIN_PROMPTS:
        warnings.append(
            f"few prompts ({prompts}): the intervals are unreliable (at least {MIN_PROMPTS}: "
            "eval.max_prompts, or a larger eval.suite)"
        )
    if settings.calibrate and prompts < 2 * MIN_INTERVAL_PROMPTS:
        warnings.append(
            f"eval.calibrate: no calibration of {prompts} prompts, {MIN_INTERVAL_PROMPTS} are "
            "needed in each half (eval.max_prompts)"
        )
    timed = min(max(settings.timing_prompts, *settings.timing_batches), prompts)
    if settings.timing_prompts and timed < MIN_TIMED_PROMPTS:
        effect = (
            f"an interval needs {MIN_INTERVAL_PROMPTS}, a reliable one"
            if timed < MIN_INTERVAL_PROMPTS
            else "the intervals of speed-ups are too narrow below"
        )
        more = "eval.timing_prompts" if timed < prompts else "eval.max_prompts, a larger eval.suite"
        warnings.append(f"few timed prompts ({timed}): {effect} {MIN_TIMED_PROMPTS} ({more})")
    return warnings


def head_warnings(head: NamedHead, suite: Suite) -> list[str]:
    """Return warnings if a head was trained on prompts of a suite, whose AL is higher then, or if
    prompts are longer than it was validated on, and not all its layers see a window of keys.
    """
    warnings, of = [], f"of the {len(suite.prompts):,} prompts of {suite.name}"
    if seen := sum(suite.digests.get(id_) in head.trained_on for id_, _ in suite.prompts):
        warnings.append(
            f"{head.name} was trained on {seen:,} {of}: expect a lower AL of new ones (eval.suite)"
        )
    config = head.head.config
    known = config.validated_positions
    longer = sum(len(ids) > known for _, ids in suite.prompts) if known else 0
    if longer and not all(layer.window for layer in head.head.layers):
        window = ""
        if hasattr(config, "sliding_window"):
            window = " or sees a window of keys (sliding_window in its draftlab.json)"
        warnings.append(
            f"{longer:,} {of} are longer than the {known:,} tokens that {head.name} was validated "
            f"up to: expect a lower AL there, unless it is trained on longer ones "
            f"(record.max_length){window}"
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
    if row.prompts >= MIN_INTERVAL_PROMPTS and row.drafts and not row.acceptance_length_ci:
        warnings.append(
            f"AL has no interval: fewer than {MIN_INTERVAL_PROMPTS} of {row.prompts} prompts have "
            "answers of more than one token"
        )
    for timing in row.timings:
        if timing.disturbance:
            warnings.append(f"{timing.disturbance}; repeat the evaluation on a quiet machine")
        if timing.speedup_ci is None:
            continue
        pays = drafting_pays(timing.speedup_ci)
        if pays is False:
            warnings.append(f"drafting slows decoding down at batch {timing.batch}")
        elif pays is None:
            warnings.append(
                f"the intervals do not show whether drafting pays at batch {timing.batch}"
            )
    return warnings
