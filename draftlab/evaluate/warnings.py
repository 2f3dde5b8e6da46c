"""Warnings of an evaluation, in the rows of its report.

Equal texts of several rows are printed once, so that figures of a row are left to its table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from draftlab.evaluate.cost_model import Cliff, Shape, find_cliffs
from draftlab.evaluate.decoding_config import NamedHead
from draftlab.evaluate.headline import drafting_pays
from draftlab.evaluate.results import LoadPoint, Row
from draftlab.evaluate.self_check import failure_message
from draftlab.evaluate.settings import EvalSettings
from draftlab.evaluate.speedup_model import conditions
from draftlab.formatting import count_text
from draftlab.intervals import MIN_INTERVAL_PROMPTS

MIN_PROMPTS = 30
MIN_TIMED_PROMPTS = 10
MAX_CLIFFS = 3
"""Warnings of slow steps for a head under the same conditions."""


def suite_warnings(prompts: int, settings: EvalSettings) -> list[str]:
    """Return warnings if there are too few prompts for reliable intervals."""
    warnings = []
    if prompts < MIN_PROMPTS:
        warnings.append(
            f"few prompts ({prompts}): the intervals are unreliable (at least {MIN_PROMPTS}: "
            "eval.max_prompts, or a larger eval.suite)"
        )
    timed = min(max(settings.timing_prompts, *settings.timing_batches), prompts)
    if settings.timing_prompts and timed < MIN_TIMED_PROMPTS:
        effect = (
            "speed-ups have no interval, and there is no verdict"
            if timed < MIN_INTERVAL_PROMPTS
            else "their intervals are too narrow"
        )
        warnings.append(
            f"few timed prompts ({timed}): {effect} (eval.timing_prompts, at least "
            f"{MIN_TIMED_PROMPTS})"
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


def with_cliff_warnings(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with warnings about timed steps that take far longer than others suggest."""
    steps = [
        (row, (timing.batch, row.k), timing.step_ms)
        for row in rows
        for timing in row.timings
        if timing.step_ms
    ]
    texts = _cliff_texts(steps)
    return [
        row.model_copy(update={"warnings": row.warnings + texts.get(id(row), [])}) for row in rows
    ]


def with_load_cliff_warnings(points: Sequence[LoadPoint]) -> list[LoadPoint]:
    """Return the points with warnings about steps that take far longer than others suggest.

    The steps hold prefills of other requests: without them their times are only estimates.
    """
    steps = [
        (point, (point.concurrency, point.k), point.step_ms) for point in points if point.step_ms
    ]
    texts = _cliff_texts(steps)
    return [
        point.model_copy(update={"warnings": point.warnings + texts.get(id(point), [])})
        for point in points
    ]


def _cliff_texts(
    steps: Iterable[tuple[Row | LoadPoint, Shape, float]],
) -> dict[int, list[str]]:
    """Return the texts of the cliffs among measured steps, by the id of the row or point.

    Steps are compared with those of the same head under the same conditions, and of plain decoding.
    """
    plain: dict[tuple[object, ...], list[tuple[Row | LoadPoint, Shape, float]]] = {}
    drafted: dict[tuple[object, ...], list[tuple[Row | LoadPoint, Shape, float]]] = {}
    for step in steps:
        engine, head, temperature, draft_probs = conditions(step[0])
        if head is None:
            plain.setdefault((engine, temperature), []).append(step)
        else:
            drafted.setdefault((engine, temperature, head, draft_probs), []).append(step)
    texts: dict[int, list[str]] = {}
    reported: set[tuple[int, Shape]] = set()  # plain decoding is compared beside every head
    for key, members in (drafted or plain).items():
        group = plain.get(key[:2], []) + members if drafted else members
        owner = {shape: id(one) for one, shape, _ in group}
        # The tokens of a step hardly depend on the concurrency: those of any point of a K serve.
        points = [one for one, *_ in group if isinstance(one, LoadPoint)]
        tokens = {point.k: point.tokens_per_step or 1.0 for point in points}
        cliffs = find_cliffs({shape: ms for _, shape, ms in group}, tokens)
        for cliff, text in summarize_cliffs(cliffs):
            shape = cliff.batch, cliff.k
            if (owner[shape], shape) in reported:
                continue
            reported.add((owner[shape], shape))
            texts.setdefault(owner[shape], []).append(text)
    return texts


def summarize_cliffs(cliffs: Sequence[Cliff]) -> list[tuple[Cliff, str]]:
    """Return a warning for each batch with cliffs, beside the first of them, at most `MAX_CLIFFS`.

    Plain decoding, which is compared beside every head, has a warning of its own. The last warning
    counts the steps that none names.
    """
    batches: dict[tuple[int, bool], list[Cliff]] = {}
    for cliff in cliffs:
        batches.setdefault((cliff.batch, cliff.k > 0), []).append(cliff)
    named = [*batches.values()][:MAX_CLIFFS]
    warnings = []
    for first, *others in named:
        ks = ", ".join(str(k) for k in sorted(one.k for one in others))
        warnings.append((first, first.text + (f"; the same holds for K = {ks}" if others else "")))
    if left := len(cliffs) - sum(len(group) for group in named):
        last, text = warnings[-1]
        more = count_text(left, "more such step")
        warnings[-1] = last, f"{text}; {more}, as if the machine was busy"
    return warnings
