"""The K adviser: the speed-up that every K would give, from measured steps and acceptance.

With K drafts a step emits AL(K) = 1 + Σ_{i≤K} a_i tokens, where a_i is the unconditional acceptance
at position i. The first K drafts are the same however many follow, so the a_i of the largest K
serve every smaller one. A step costs s(K) milliseconds: a target pass over K + 1 tokens, and of a
chain K passes of the head, of a parallel head one. As long as all are bound by reading weights that
is a line in K, for a parallel head a flat one; between measured K's it is interpolated, beyond them
the slope is kept (that of a parallel head timed at one K alone is 0). Plain decoding takes s(0) for
a token, so

    speed-up(K) = s(0) · AL(K) / s(K).

The acceptance is the whole suite's, the times are those of the timed prompts: where the prediction
misses a measured speed-up, either the timed prompts are easier or harder than the suite, or the
line is none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from draftlab.evaluate.break_even import break_even
from draftlab.evaluate.results import Row

CLOSE = 0.05


@dataclass(frozen=True)
class StepPoint:
    """A step time that was measured with `k` drafts and `batch` prompts at once."""

    engine: str
    head: str | None
    batch: int
    k: int
    step_ms: float


@dataclass(frozen=True)
class Prediction:
    """What K drafts a step would give; the last three only where K was timed.

    `error` is predicted / measured − 1; `met` tells whether the prediction lies in the interval of
    the measured speed-up, or within `CLOSE` of it.
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
    """The K's of one head at one temperature, drafter setting and batch.

    Attributes:
        drafter: "chain" or "parallel".
        plain_ms: TPOT without drafting.
        best_k: of the highest predicted speed-up.
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


def advise(rows: Sequence[Row], probes: Iterable[StepPoint] = ()) -> dict[str, Any] | None:
    """`report.adviser`: {"advice": [Advice, …], "check": …, "break_even": [BreakEven, …]}.

    None where nothing was timed.

    "check" says how well the predictions met what was measured: `timed` predictions, how many of
    them `met` it, and their `mean_error` and `worst_error` in size.

    Args:
        rows: of a report.
        probes: further step times, for the slope where a head was timed at one K only.
    """
    probes, groups = list(probes), _groups(rows)
    advice = [
        _advice(group, batch, probes)
        for group in groups
        for batch in (timing.batch for timing in group[-1].timings)
    ]
    found = [one for one in advice if one is not None]
    if not found:
        return None
    timed = [p for one in found for p in one.predictions if p.error is not None]
    errors = [abs(p.error or 0.0) for p in timed]
    check = {
        "timed": len(timed),
        "met": sum(bool(p.met) for p in timed),
        "mean_error": float(np.mean(errors)),
        "worst_error": max(errors),
    }
    return {
        "advice": [asdict(one) for one in found],
        "check": check if timed else None,
        "break_even": [asdict(one) for one in break_even(found)],
    }


def _groups(rows: Sequence[Row]) -> list[list[Row]]:
    """Drafted rows that differ in K alone, by ascending K."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row.counters.drafts:
            key = (row.engine, row.head, row.temperature, row.draft_probs)
            groups.setdefault(key, []).append(row)
    return [sorted(group, key=lambda row: row.k) for group in groups.values()]


def _advice(group: Sequence[Row], batch: int, probes: Sequence[StepPoint]) -> Advice | None:
    """None where the steps at other K's are unknown, or plain decoding was not timed."""
    deepest = group[-1]
    timed = {row.k: t for row in group for t in row.timings if t.batch == batch}
    steps = {k: t.step_ms for k, t in timed.items() if t.step_ms is not None}
    plain = next((t.baseline_tpot_ms for t in timed.values() if t.baseline_tpot_ms), None)
    others = {
        p.k: p.step_ms
        for p in probes
        if (p.engine, p.head, p.batch) == (deepest.engine, deepest.head, batch)
    }
    flat = deepest.drafter == "parallel"
    unknown = len(steps) < 2 and len(others) < 2 and deepest.k > 1 and not flat
    if plain is None or not steps or unknown:
        return None
    acceptance = deepest.counters.acceptance_at or []
    predictions = []
    for k in range(1, deepest.k + 1):
        length = 1 + sum(acceptance[:k])
        # a step that verifies drafts costs no less than one that has none
        step = max(step_ms(k, steps, others), plain)
        speedup = plain * length / step
        measured = timed[k].speedup if k in timed else None
        error, met = None, None
        if measured is not None:
            low, high = timed[k].speedup_ci or (measured, measured)
            error = speedup / measured - 1
            met = low <= speedup <= high or abs(error) <= CLOSE
        predictions.append(
            Prediction(k, length, step, step / length, speedup, measured, error, met)
        )
    best = max(predictions, key=lambda p: p.speedup)
    return Advice(
        deepest.engine,
        deepest.head,
        deepest.drafter,
        deepest.temperature,
        deepest.draft_probs,
        batch,
        plain,
        best.k,
        _text(best, predictions, batch),
        tuple(predictions),
    )


def step_ms(k: int, steps: dict[int, float], others: dict[int, float]) -> float:
    """Milliseconds of a step with `k` drafts.

    Args:
        steps: measured, by K.
        others: of the same head and batch under other conditions; they give the slope outside of
            what `steps` spans. With one step and less than two of them it is 0.
    """
    known = sorted(steps)
    if known[0] <= k <= known[-1]:
        return float(np.interp(k, known, [steps[i] for i in known]))
    end = known[0] if k < known[0] else known[-1]
    if len(others) > 1:
        return steps[end] + _slope(sorted(others), others) * (k - end)
    if len(known) < 2:
        return steps[end]
    pair = known[:2] if k < known[0] else known[-2:]
    return steps[end] + _slope(pair, steps) * (k - end)


def _slope(depths: Sequence[int], steps: dict[int, float]) -> float:
    """Milliseconds a further draft costs: least squares through the points."""
    return float(np.polyfit(depths, [steps[k] for k in depths], 1)[0])


def _text(best: Prediction, predictions: Sequence[Prediction], batch: int) -> str:
    """ "best K = 5 at batch 1: predicted 1.90×; measured at K = 4: 1.80×, predicted 1.82×".

    A prediction that a measurement refutes says so.
    """
    text = f"best K = {best.k} at batch {batch}: predicted {best.speedup:.2f}×"
    measured = [p for p in predictions if p.measured_speedup is not None]
    if best.measured_speedup is not None:
        text += f", measured {best.measured_speedup:.2f}×"
    elif measured:
        near = min(measured, key=lambda p: abs(p.k - best.k))
        text += (
            f"; measured at K = {near.k}: {near.measured_speedup:.2f}×, "
            f"predicted {near.speedup:.2f}×"
        )
    refuted = [p for p in predictions if p.met is False]
    if refuted:
        worst = max(refuted, key=lambda p: abs(p.error or 0.0))
        text += f"; NOT MET: {100 * (worst.error or 0.0):+.0f} % off at K = {worst.k}"
    if best.speedup <= 1:
        text += "; drafting does not pay here"
    elif best.k == predictions[-1].k:
        text += "; no larger K was measured"
    return text
