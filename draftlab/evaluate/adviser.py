"""The K adviser: predict the speed-up of every K from measured step times and acceptance.

With K drafts a step emits AL(K) = 1 + Σ_{i≤K} a_i tokens, where a_i is the unconditional acceptance
at position i. The first K drafts do not depend on how many follow, so the a_i of the largest K
serve every smaller one. A step takes s(K) milliseconds: one pass of the target over K + 1 tokens,
and K passes of a chain head or one pass of a parallel head. As long as all of them are bound by
reading weights, s is linear in K, and constant for a parallel head. The adviser interpolates
between measured values of K and keeps the slope beyond them (0 for a parallel head that was timed
at a single K). Plain decoding takes s(0) per token, so

    speed-up(K) = s(0) · AL(K) / s(K).

The acceptance belongs to the whole suite, the times to the timed prompts. If a prediction misses
the measured speed-up, the timed prompts are easier or harder than the suite, or s is not linear.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from draftlab.evaluate.break_even import break_even
from draftlab.evaluate.results import Row

TOLERANCE = 0.05
"""Largest relative error of a correct prediction outside the measured interval."""


@dataclass(frozen=True)
class StepTime:
    """The measured time of a step with `k` drafts and `batch` prompts at once."""

    engine: str
    head: str | None
    batch: int
    k: int
    step_ms: float


@dataclass(frozen=True)
class Prediction:
    """The predicted effect of K drafts a step; the last three fields are None if K was not timed.

    `error` is predicted / measured − 1. `met` is true if the prediction lies in the interval of the
    measured speed-up or within `TOLERANCE` of it.
    """

    k: int
    acceptance_length: float
    step_ms: float
    tpot_ms: float
    speedup: float
    measured_speedup: float | None
    error: float | None
    met: bool | None


@dataclass(frozen=True)
class Advice:
    """The predictions for one head, temperature, drafter setting and batch.

    Attributes:
        drafter: "chain" or "parallel".
        plain_ms: TPOT without drafting.
        best_k: the K with the highest predicted speed-up.
        text: the advice in one line.
    """

    engine: str
    head: str | None
    drafter: str
    temperature: float
    draft_probs: bool
    batch: int
    plain_ms: float
    best_k: int
    text: str
    predictions: tuple[Prediction, ...]


def advise(rows: Sequence[Row], step_times: Iterable[StepTime] = ()) -> dict[str, Any] | None:
    """Return `report.adviser`: {"advice": [Advice, …], "check": …, "break_even": [BreakEven, …]}.

    "check" compares the predictions with the measured speed-ups: the number of `timed` predictions,
    how many of them `met` the measurement, and the `mean_error` and `worst_error` in size. The
    result is None if nothing was timed.

    Args:
        rows: rows of a report.
        step_times: further step times, for the slope of heads that were timed at one K only.
    """
    step_times = list(step_times)
    candidates = (
        _advice(group, timing.batch, step_times)
        for group in _groups(rows)
        for timing in group[-1].timings
    )
    advice = [one for one in candidates if one is not None]
    if not advice:
        return None
    return {
        "advice": [asdict(one) for one in advice],
        "check": _check([p for one in advice for p in one.predictions if p.error is not None]),
        "break_even": [asdict(one) for one in break_even(advice)],
    }


def _check(timed: Sequence[Prediction]) -> dict[str, Any] | None:
    if not timed:
        return None
    errors = [abs(p.error or 0.0) for p in timed]
    return {
        "timed": len(timed),
        "met": sum(bool(p.met) for p in timed),
        "mean_error": float(np.mean(errors)),
        "worst_error": max(errors),
    }


def _groups(rows: Sequence[Row]) -> list[list[Row]]:
    """Return groups of drafted rows that differ in K alone, by ascending K."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row.drafts:
            key = (row.engine, row.head, row.temperature, row.draft_probs)
            groups.setdefault(key, []).append(row)
    return [sorted(group, key=lambda row: row.k) for group in groups.values()]


def _advice(group: Sequence[Row], batch: int, step_times: Sequence[StepTime]) -> Advice | None:
    """Return the advice of a group; None if its step times do not give a slope."""
    largest = group[-1]
    timed = {row.k: t for row in group for t in row.timings if t.batch == batch}
    steps = {k: t.step_ms for k, t in timed.items() if t.step_ms is not None}
    plain = next((t.baseline_tpot_ms for t in timed.values() if t.baseline_tpot_ms), None)
    others = {
        t.k: t.step_ms
        for t in step_times
        if (t.engine, t.head, t.batch) == (largest.engine, largest.head, batch)
    }
    needs_slope = largest.drafter != "parallel" and largest.k > 1
    if plain is None or not steps or (needs_slope and len(steps) < 2 and len(others) < 2):
        return None
    acceptance = largest.counters.acceptance_at or []
    predictions = []
    for k in range(1, largest.k + 1):
        length = 1 + sum(acceptance[:k])
        # a step that verifies drafts takes at least as long as one without drafts
        step = max(step_ms(k, steps, others), plain)
        speedup = plain * length / step
        measured = timed[k].speedup if k in timed else None
        error, met = None, None
        if measured is not None:
            low, high = timed[k].speedup_ci or (measured, measured)
            error = speedup / measured - 1
            met = low <= speedup <= high or abs(error) <= TOLERANCE
        predictions.append(
            Prediction(k, length, step, step / length, speedup, measured, error, met)
        )
    best = max(predictions, key=lambda p: p.speedup)
    return Advice(
        engine=largest.engine,
        head=largest.head,
        drafter=largest.drafter,
        temperature=largest.temperature,
        draft_probs=largest.draft_probs,
        batch=batch,
        plain_ms=plain,
        best_k=best.k,
        text=_text(best, predictions, batch),
        predictions=tuple(predictions),
    )


def step_ms(k: int, steps: dict[int, float], others: dict[int, float]) -> float:
    """Return the milliseconds of a step with `k` drafts.

    Args:
        steps: measured step times, by K.
        others: step times of the same head and batch under other conditions. They give the slope
            outside the range of `steps`. With fewer than two of them and one step the slope is 0.
    """
    ks = sorted(steps)
    if ks[0] <= k <= ks[-1]:
        return float(np.interp(k, ks, [steps[i] for i in ks]))
    end = ks[0] if k < ks[0] else ks[-1]
    if len(others) > 1:
        return steps[end] + _slope(sorted(others), others) * (k - end)
    if len(ks) < 2:
        return steps[end]
    nearest = ks[:2] if k < ks[0] else ks[-2:]
    return steps[end] + _slope(nearest, steps) * (k - end)


def _slope(ks: Sequence[int], steps: dict[int, float]) -> float:
    """Return the milliseconds of one more draft, by least squares."""
    return float(np.polyfit(ks, [steps[k] for k in ks], 1)[0])


def _text(best: Prediction, predictions: Sequence[Prediction], batch: int) -> str:
    """Return "best K = 5 at batch 1: predicted 1.90×; measured at K = 4: 1.80×, predicted 1.82×".

    The text also names the prediction that a measurement refutes most clearly.
    """
    text = f"best K = {best.k} at batch {batch}: predicted {best.speedup:.2f}×"
    measured = [p for p in predictions if p.measured_speedup is not None]
    if best.measured_speedup is not None:
        text += f", measured {best.measured_speedup:.2f}×"
    elif measured:
        nearest = min(measured, key=lambda p: abs(p.k - best.k))
        text += (
            f"; measured at K = {nearest.k}: {nearest.measured_speedup:.2f}×, "
            f"predicted {nearest.speedup:.2f}×"
        )
    refuted = [p for p in predictions if p.met is False]
    if refuted:
        worst = max(refuted, key=lambda p: abs(p.error or 0.0))
        text += f"; the prediction at K = {worst.k} is WRONG by {100 * (worst.error or 0.0):+.0f} %"
    if best.speedup <= 1:
        text += "; drafting does not pay here"
    elif best.k == predictions[-1].k:
        text += "; no larger K was measured"
    return text
