"""The K adviser: predict the speed-up for every K and batch.

With K drafts a step emits n(K) tokens in s(K) milliseconds; plain decoding emits one in s(0). So

    speed-up(K) = n(K) · s(0) / s(K).

Where the suite was decoded and timed with K drafts, this is the row's own speed-up. n(K) belongs to
the whole suite. Where the suite was decoded with K drafts, it is that row's own
count. Between two counted values of K the unconditional acceptance a_i of each position and the
share of the tokens that were emitted (stop tokens and limits truncate some) are interpolated;
positions that only the larger K has are the larger one's. K = 0 counts as decoded, with n(0) = 1.
Beyond the largest counted K there is no prediction. s(K) belongs to the timed prompts. Where K was
not timed it is interpolated between the timed K's of the batch (`speedup_model.py`; for a parallel
head that was timed at a single K, s is constant).

`advice_check.py` has the check: each timed K is predicted from the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from draftlab.evaluate.advice_check import Check, check_left_out, check_summary
from draftlab.evaluate.break_even import break_even
from draftlab.evaluate.headline import drafting_pays
from draftlab.evaluate.results import Row
from draftlab.evaluate.speedup_model import (
    Acceptance,
    Probe,
    SpeedupTable,
    conditions,
    timing_tables,
)

PREDICTS = (
    "a speed-up is over all prompts of the suite: its own tokens a step, with the step times of "
    "the timed prompts; its interval holds the variation between prompts of both"
)


@dataclass(frozen=True)
class Prediction:
    """The predicted effect of K drafts a step on the whole suite.

    The last five fields belong to the timed prompts alone, which also decode with K's that the
    suite is not decoded with. They are None if K was not timed, the last four also if it was not
    timed between two other values of K (see `Check`).

    Attributes:
        measured: whether `speedup` is that of a row that was timed at this batch; else predicted.
        speedup_ci: the 95 % interval over the prompts of the suite and of the timing pass; None:
            there are too few.
        timed_speedup: measured on the timed prompts.
    """

    k: int
    acceptance_length: float
    tokens_per_step: float
    step_ms: float
    tpot_ms: float
    measured: bool
    speedup: float
    speedup_ci: tuple[float, float] | None
    timed_speedup: float | None = None
    left_out_speedup: float | None = None
    error: float | None = None
    met: bool | None = None
    close: bool | None = None


@dataclass(frozen=True)
class Advice:
    """The predictions for one head, temperature, drafter setting and batch.

    Attributes:
        drafter: "chain" or "parallel".
        plain_ms: TPOT without drafting.
        best_k: the K with the highest measured speed-up, unless another one is predicted to be
            faster beyond both intervals.
        text: the advice in one line.
    """

    suite: str
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


def advise(rows: Sequence[Row], probes: Iterable[Probe] = ()) -> dict[str, Any] | None:
    """Return `report.adviser`: {"predicts", "advice", "check", "break_even"}.

    "predicts" says what a prediction is of; "advice" holds an `Advice` each. "check" is about the
    predictions of left-out values of K: how many were `timed`, how many of them `met` the
    measurement, how many are `close`, `mean_error` and `worst_error` in size (None if there are
    none), and all of it as `text`. The result is None if nothing was timed.
    """
    probes = list(probes)
    advice = [
        one
        for suite in dict.fromkeys(row.suite for row in rows)
        for one in _suite_advice(
            [row for row in rows if row.suite == suite], [p for p in probes if p.suite == suite]
        )
    ]
    if not advice:
        return None
    predictions = [p for one in advice for p in one.predictions]
    return {
        "predicts": PREDICTS,
        "advice": [asdict(one) for one in advice],
        "check": check_summary(
            [
                Check(p.left_out_speedup, p.error, p.met, p.close)
                for p in predictions
                if p.error is not None
            ]
        ),
        "break_even": [asdict(one) for one in break_even(advice)],
    }


def _suite_advice(rows: Sequence[Row], probes: Sequence[Probe]) -> Iterator[Advice]:
    """Yield the advice for a suite's rows: for each of their conditions, at each batch."""
    tables = timing_tables(rows, probes)
    by_key: dict[Any, list[Row]] = {}
    for row in sorted((row for row in rows if row.drafts), key=lambda row: row.k):
        by_key.setdefault(conditions(row), []).append(row)
    for key, members in by_key.items():
        for batch in (timing.batch for timing in members[-1].timings):
            table = tables.get(key)
            if table is None or batch not in table.batches:
                continue
            if (one := _advice(table, members, batch)) is not None:
                yield one


def _advice(table: SpeedupTable, rows: Sequence[Row], batch: int) -> Advice | None:
    """Return the advice at a batch; None if the step times do not give a slope.

    Args:
        rows: the decoded suite, by K.
    """
    largest = rows[-1]
    counted = {
        row.k: Acceptance(
            row.counters.acceptance_at or (), row.tokens_per_step / (row.acceptance_length or 1.0)
        )
        for row in rows
    }
    lengths = {row.k: row.acceptance_length_ci for row in rows}
    ratios = {k: one.step_ratio_ci for k, one in table.at_batch(batch).items()}
    own = {row.k: t for row in rows for t in row.timings if t.batch == batch and t.speedup}
    predictions = []
    for k in range(1, largest.k + 1):
        predicted = table.predict(batch, k, counted)
        if predicted is None:
            return None
        acceptance, step, speedup = predicted
        interval = _interval(speedup, [_half_width(ones, k) for ones in (lengths, ratios)])
        if k in own:
            speedup, interval = own[k].speedup, own[k].speedup_ci
        timed = table.measured.get((batch, k))
        prediction = Prediction(
            k,
            acceptance.length,
            acceptance.tokens,
            step,
            step / acceptance.tokens,
            k in own,
            speedup,
            interval,
            timed and timed.speedup,
        )
        check = check_left_out(table, batch, k)
        predictions.append(replace(prediction, **asdict(check)) if check else prediction)
    best = _best(predictions)
    return Advice(
        suite=largest.suite,
        engine=largest.engine,
        head=largest.head,
        drafter=largest.drafter,
        temperature=largest.temperature,
        draft_probs=largest.draft_probs,
        batch=batch,
        plain_ms=table.measured[batch, 0].step_ms,
        best_k=best.k,
        text=_text(best, predictions, batch),
        predictions=tuple(predictions),
    )


def _half_width(intervals: Mapping[int, tuple[float, float] | None], k: int) -> float | None:
    """Return half the width of the interval at K, or else of the widest, as a logarithm."""
    widths = {i: math.log(ci[1] / ci[0]) / 2 for i, ci in intervals.items() if ci and ci[0] > 0}
    return widths.get(k, max(widths.values(), default=None))


def _interval(speedup: float, widths: Sequence[float | None]) -> tuple[float, float] | None:
    """Return the interval of a predicted speed-up; None if the width of a part is not known.

    Tokens a step vary between the prompts of the suite as AL does, and step times between timed
    prompts. Both are independent, so the squares of their relative widths add up.
    """
    known = [width for width in widths if width is not None]
    if len(known) < len(widths):
        return None
    width = math.hypot(*known)
    return speedup * math.exp(-width), speedup * math.exp(width)


def _best(predictions: Sequence[Prediction]) -> Prediction:
    """Return the prediction of the best K (see `Advice`)."""
    measured = [one for one in predictions if one.measured]
    best = max(measured or predictions, key=lambda p: p.speedup)
    limit = best.speedup_ci[1] if best.speedup_ci else math.inf
    clear = [p for p in predictions if p.speedup_ci and p.speedup_ci[0] > limit]
    return max(clear, key=lambda p: p.speedup, default=best)


def _text(best: Prediction, predictions: Sequence[Prediction], batch: int) -> str:
    """Return "best K = 5 at batch 1: 1.90× [1.80, 2.01], measured".

    Beside a predicted speed-up the text has that of the nearest measured K, and beside a measured
    one a higher prediction. It also names the left-out K whose prediction a measurement refutes
    most clearly.
    """

    def speedup(one: Prediction) -> str:
        limits = one.speedup_ci and " [{:.2f}, {:.2f}]".format(*one.speedup_ci)
        return f"{one.speedup:.2f}×{limits or ''}"

    text = f"best K = {best.k} at batch {batch}: {speedup(best)}"
    text += ", measured" if best.measured else ", predicted"
    measured = [one for one in predictions if one.measured]
    if measured and not best.measured:
        nearest = min(measured, key=lambda p: abs(p.k - best.k))
        text += f"; measured at K = {nearest.k}: {speedup(nearest)}"
    highest = max(predictions, key=lambda p: p.speedup)
    if highest.k != best.k:
        text += f"; K = {highest.k} is predicted not to be clearly faster: {speedup(highest)}"
    refuted = [p for p in predictions if p.met is False]
    if refuted:
        worst = max(refuted, key=lambda p: abs(p.error or 0.0))
        text += (
            f"; the prediction of K = {worst.k} from the other timed K's is off by "
            f"{100 * (worst.error or 0.0):+.0f} %"
        )
    pays = drafting_pays(best.speedup_ci)
    if pays is False:
        text += "; drafting does not pay here"
    elif pays is None:
        text += "; it is not shown whether drafting pays here"
    elif best.k == predictions[-1].k:
        text += "; no larger K was measured"
    return text
