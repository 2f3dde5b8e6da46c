"""The K adviser: predict the speed-up over the whole suite for every K.

With K drafts a step emits n(K) tokens in s(K) milliseconds; plain decoding emits one in s(0). So

    speed-up(K) = n(K) · s(0) / s(K).

n(K) belongs to the whole suite. Where the suite was decoded with K drafts, it is that row's own
count. Between two counted values of K the unconditional acceptance a_i of each position and the
share of the tokens that were emitted (stop tokens and limits truncate some) are interpolated;
positions that only the larger K has are the larger one's. K = 0 counts as decoded, with n(0) = 1.
Beyond the largest counted K there is no prediction. s(K) belongs to the timed prompts and is
interpolated between timed values of K; outside of them the slope is kept (0 for a parallel head
that was timed at a single K).

The check leaves out one timed K at a time, and predicts the speed-up that was measured there from
the step times and the acceptance of the timed prompts at the other values of K alone. It leaves out
values between two others: without the smallest or largest K the prediction would go beyond the
measurements, where the cost of a step may bend, as it does where a kernel needs a second tile.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from draftlab.evaluate.break_even import break_even
from draftlab.evaluate.results import Row
from draftlab.evaluate.speedup_model import Probe, SpeedupModel, Steps, conditions, speedup_models

PREDICTS = (
    "a prediction is of the speed-up over all prompts of the suite: its own tokens a step, with "
    "the step times of the timed prompts; its interval holds the variation between prompts of both"
)


@dataclass(frozen=True)
class Prediction:
    """The predicted effect of K drafts a step on the whole suite.

    The last four fields belong to the timed prompts. They are None if K was not timed, the last
    three also if it was not timed between two other values of K.

    Attributes:
        speedup_ci: 95 % interval over the prompts of the suite and of the timing pass.
        measured_speedup: measured on the timed prompts.
        left_out_speedup: predicted for the timed prompts without the measurement at this K.
        error: left_out_speedup / measured_speedup − 1.
        met: whether `left_out_speedup` lies in the interval of the measured speed-up.
    """

    k: int
    acceptance_length: float
    tokens_per_step: float
    step_ms: float
    tpot_ms: float
    speedup: float
    speedup_ci: tuple[float, float]
    measured_speedup: float | None = None
    left_out_speedup: float | None = None
    error: float | None = None
    met: bool | None = None


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


def advise(rows: Sequence[Row], probes: Iterable[Probe] = ()) -> dict[str, Any] | None:
    """Return `report.adviser`: {"predicts": …, "advice": [Advice, …], "check": …, "break_even": …}.

    "predicts" says what a prediction is of. "check" is about the predictions of left-out values of
    K: how many were `timed`, how many of them `met` the measurement, `mean_error` and `worst_error`
    in size (None if there are none), and all of it as `text`. The result is None if nothing was
    timed.
    """
    models = speedup_models(rows, list(probes))
    advice = [one for model in models if (one := _advice(model, models)) is not None]
    if not advice:
        return None
    return {
        "predicts": PREDICTS,
        "advice": [asdict(one) for one in advice],
        "check": _check([p for one in advice for p in one.predictions]),
        "break_even": [asdict(one) for one in break_even(advice)],
    }


def _check(predictions: Sequence[Prediction]) -> dict[str, Any]:
    checked = [p for p in predictions if p.error is not None]
    errors = [abs(p.error or 0.0) for p in checked]
    met, text = sum(bool(p.met) for p in checked), "no prediction was checked: too few timed K's"
    mean, worst = (float(np.mean(errors)), max(errors)) if errors else (None, None)
    if mean is not None and worst is not None:
        text = (
            f"{met} of {len(checked)} speed-ups at a timed K, predicted from the other timed K's, "
            f"lie in the measured interval; the error is {100 * mean:.0f} % on average and "
            f"{100 * worst:.0f} % at most"
        )
    return {
        "timed": len(checked),
        "met": met,
        "mean_error": mean,
        "worst_error": worst,
        "text": text,
    }


def _advice(model: SpeedupModel, models: Sequence[SpeedupModel]) -> Advice | None:
    """Return the advice of a model; None if its step times do not give a slope."""
    largest = model.largest
    key = conditions(largest)[:2], model.batch  # engine, head and batch
    same_head = [m.steps for m in models if (conditions(m.largest)[:2], m.batch) == key]
    others = max(same_head, key=len)  # where this model has one K, they give the slope
    plain = next((t.baseline_tpot_ms for t in model.timings.values() if t.baseline_tpot_ms), None)
    if plain is None:
        return None
    predictions = tuple(
        one for k in range(1, largest.k + 1) if (one := _predict(model, k, plain, others))
    )
    if len(predictions) < largest.k:
        return None
    best = max(predictions, key=lambda p: p.speedup)
    return Advice(
        engine=largest.engine,
        head=largest.head,
        drafter=largest.drafter,
        temperature=largest.temperature,
        draft_probs=largest.draft_probs,
        batch=model.batch,
        plain_ms=plain,
        best_k=best.k,
        text=_text(best, predictions, model.batch),
        predictions=predictions,
    )


def _predict(model: SpeedupModel, k: int, plain: float, others: Steps) -> Prediction | None:
    at_k = model.at(k, plain, model.counted, model.steps, others)
    if at_k is None:
        return None
    acceptance, step, speedup = at_k
    timing = model.timings.get(k)
    prediction = Prediction(
        k,
        acceptance.length,
        acceptance.tokens,
        step,
        step / acceptance.tokens,
        speedup,
        _interval(model, k, speedup),
        timing and timing.speedup,
    )
    rest = (
        {i: value for i, value in values.items() if i != k}
        for values in (model.timed, model.steps, others)
    )
    left_out = model.at(k, plain, *rest) if min(model.steps) < k < max(model.steps) else None
    if timing is None or timing.speedup is None or left_out is None:
        return prediction
    low, high = timing.speedup_ci or (timing.speedup,) * 2
    *_, speedup = left_out
    return replace(
        prediction,
        left_out_speedup=speedup,
        error=speedup / timing.speedup - 1,
        met=low <= speedup <= high,
    )


def _interval(model: SpeedupModel, k: int, speedup: float) -> tuple[float, float]:
    """Return the 95 % interval of a predicted speed-up.

    Tokens a step vary between the prompts of the suite as AL does, and step times between timed
    prompts. Both are independent, so the squares of their relative widths add up. At a K that was
    not counted or not timed the widest interval of the others is used.
    """
    ratios = {i: timing.step_ratio_ci for i, timing in model.timings.items()}
    width = math.hypot(*(_half_width(intervals, k) for intervals in (model.lengths, ratios)))
    return speedup * math.exp(-width), speedup * math.exp(width)


def _half_width(intervals: Mapping[int, tuple[float, float] | None], k: int) -> float:
    """Return half the width of the interval at K, or else of the widest, as a logarithm."""
    widths = {i: math.log(ci[1] / ci[0]) / 2 for i, ci in intervals.items() if ci and ci[0] > 0}
    return widths.get(k, max(widths.values(), default=0.0))


def _text(best: Prediction, predictions: Sequence[Prediction], batch: int) -> str:
    """Return "best K = 5 at batch 1: 1.90× [1.80, 2.01] predicted; measured …".

    The text also names the left-out K whose prediction a measurement refutes most clearly.
    """
    low, high = best.speedup_ci
    text = (
        f"best K = {best.k} at batch {batch}: predicted {best.speedup:.2f}× [{low:.2f}, {high:.2f}]"
        " for the whole suite"
    )
    measured = [p for p in predictions if p.measured_speedup is not None]
    if measured:
        nearest = min(measured, key=lambda p: abs(p.k - best.k))
        where = "there" if nearest is best else f"at K = {nearest.k}"
        text += f"; measured {where} on the timed prompts: {nearest.measured_speedup:.2f}×"
    refuted = [p for p in predictions if p.met is False]
    if refuted:
        worst = max(refuted, key=lambda p: abs(p.error or 0.0))
        text += (
            f"; the prediction of K = {worst.k} from the other timed K's is WRONG by "
            f"{100 * (worst.error or 0.0):+.0f} %"
        )
    if best.speedup <= 1:
        text += "; drafting does not pay here"
    elif best.k == predictions[-1].k:
        text += "; no larger K was measured"
    return text
