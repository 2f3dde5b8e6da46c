"""Warnings of an evaluation, in the rows of its report.

Equal texts of several rows are printed once, so that figures of a row are left to its table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from draftlab.evaluate.adviser import Shape, conditions
from draftlab.evaluate.decoding_config import NamedHead
from draftlab.evaluate.results import Row, drafting_pays
from draftlab.evaluate.self_check import failure_message
from draftlab.evaluate.settings import EvalSettings
from draftlab.intervals import MIN_INTERVAL_PROMPTS
from draftlab.text.suites import Suite

MIN_PROMPTS = 30
MIN_TIMED_PROMPTS = 10
UNDERCUT = 0.8
"""A step is slow if one with no smaller batch and K takes less than this share of its time."""


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
        warnings.append(
            f"few timed prompts ({timed}): {effect} {MIN_TIMED_PROMPTS} (eval.timing_prompts)"
        )
    return warnings


def trained_prompt_warnings(head: NamedHead, suite: Suite) -> list[str]:
    """Return a warning if a head was trained on prompts of a suite, whose AL is higher then."""
    seen = sum(suite.digests.get(id_) in head.trained_on for id_, _ in suite.prompts)
    if not seen:
        return []
    return [
        f"{head.name} was trained on {seen:,} of the {len(suite.prompts):,} prompts of "
        f"{suite.name}: expect a lower AL of new ones (eval.suite)"
    ]


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


def with_slow_step_warnings(rows: Sequence[Row]) -> list[Row]:
    """Return rows with warnings about steps that a larger step undercuts.

    Steps are compared with those of the same head under the same conditions.
    """
    groups: dict[tuple[object, ...], dict[Shape, float]] = {}
    for row in rows:
        groups.setdefault(conditions(row), {}).update(_steps(row))
    return [
        row.model_copy(update={"warnings": [*row.warnings, *_slow(row, groups[conditions(row)])]})
        for row in rows
    ]


def _steps(row: Row) -> dict[Shape, float]:
    """Return the milliseconds of a row's measured steps."""
    return {(timing.batch, row.k): timing.step_ms for timing in row.timings if timing.step_ms}


def _slow(row: Row, steps: Mapping[Shape, float]) -> Iterator[str]:
    """Yield a warning for each step of a row that a step of at least its batch and K undercuts."""
    for (batch, k), ms in _steps(row).items():
        larger = {s: other for s, other in steps.items() if s[0] >= batch and s[1] >= k}
        b, i = min(larger, key=larger.__getitem__)
        if larger[b, i] < UNDERCUT * ms:
            yield (
                f"a step at batch {batch}, K = {k} takes {ms:.2f} ms, longer than one at batch "
                f"{b}, K = {i} ({larger[b, i]:.2f} ms): a kernel is slow at this shape, or the "
                "machine was busy"
            )
