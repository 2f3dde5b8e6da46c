"""Calibrate a row's confidence on half of its prompts, and measure it on the others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.special import expit

from draftlab.errors import UserError
from draftlab.evaluate.calibration import error, fit, savings
from draftlab.evaluate.calibration.blocks import DraftBlocks
from draftlab.evaluate.calibration.result import CalibratedPosition, Calibration, Source
from draftlab.intervals import MIN_INTERVAL_PROMPTS

MIN_BLOCKS = 100
"""Fewest blocks of each half: fewer say nothing about any bin."""


@dataclass(frozen=True)
class _Predictions:
    """Survival [N, K] of the blocks that no fit has seen, by each predictor."""

    before: np.ndarray
    logistic: np.ndarray
    after: np.ndarray
    temperatures: np.ndarray | None = None
    common: np.ndarray | None = None


def calibrate(blocks: DraftBlocks, source: Source, **conditions: Any) -> Calibration:
    """Return the calibration of a row.

    Args:
        blocks: its verify steps.
        source: what the raw confidence is; the head's own also gets temperatures.
        conditions: the fields of `Calibration` that name the row.

    Raises:
        UserError: a half has fewer than `MIN_INTERVAL_PROMPTS` prompts with drafts or `MIN_BLOCKS`
            blocks, or no block with K drafts.
    """
    fitted, held_out = blocks.split()
    for half in (fitted, held_out):
        complete = int(half.has_draft[:, -1].sum()) if len(half) else 0
        if half.num_prompts < MIN_INTERVAL_PROMPTS or len(half) < MIN_BLOCKS or not complete:
            whole = f" ({complete} with all {blocks.k} drafts)" if blocks.k > 1 else ""
            raise UserError(
                f"a calibration needs at least {MIN_INTERVAL_PROMPTS} prompts and {MIN_BLOCKS} "
                f"steps with drafts in each half of the prompts, found {half.num_prompts} and "
                f"{len(half)}{whole}",
                where="eval.calibrate",
                do="raise eval.max_prompts or eval.max_new_tokens",
            )
    raw = [1.0] * blocks.k, [0.0] * blocks.k
    slopes, intercepts = fit.fit_logistic(fitted)
    confidence = held_out.confidence
    betas = fit.fit_betas(fitted, fit.survival(fitted.confidence, slopes, intercepts))
    products = fit.survival(confidence, slopes, intercepts)
    predictions = _Predictions(
        fit.survival(confidence, *raw), products, fit.corrected_survival(products, betas)
    )
    temperatures: list[float] | None = None
    common: float | None = None
    if source == "confidence head":
        temperatures = fit.fit_temperatures(fitted)
        common = fit.fit_common_temperature(fitted)
        predictions = replace(
            predictions,
            temperatures=np.cumprod(expit(confidence / np.array(temperatures)), axis=1),
            common=np.cumprod(expit(confidence / common), axis=1),
        )
    return Calibration(
        source=source,
        fitted_prompts=fitted.num_prompts,
        fitted_blocks=len(fitted),
        prompts=held_out.num_prompts,
        blocks=len(held_out),
        positions=[
            _position(
                held_out,
                k,
                predictions,
                slope=slopes[k],
                intercept=intercepts[k],
                beta=betas[k],
                temperature=temperatures and temperatures[k],
            )
            for k in range(blocks.k)
        ],
        common_temperature=common,
        survival_savings=[
            savings.saving(
                held_out, savings.verified_by_survival(held_out, predictions.after, t), t
            )
            for t in savings.THRESHOLDS
        ],
        cutoff_savings=[
            savings.saving(held_out, savings.verified_by_cutoff(held_out, t), t)
            for t in sorted({*savings.THRESHOLDS, savings.largest_cutoff(fitted)})
        ],
        cutoff=savings.largest_cutoff(fitted),
        **conditions,
    )


def _position(
    held_out: DraftBlocks, k: int, predictions: _Predictions, **fitted: Any
) -> CalibratedPosition:
    rows, survived = held_out.survivors(k)
    before, after = predictions.before[rows, k], predictions.after[rows, k]
    mean, high = error.perfect_error(after)

    def error_of(survival: np.ndarray | None) -> float | None:
        return None if survival is None else error.calibration_error(survival[rows, k], survived)

    return CalibratedPosition(
        blocks=len(rows),
        survived=int(survived.sum()),
        error_before=error.calibration_error(before, survived),
        error_logistic=error.calibration_error(predictions.logistic[rows, k], survived),
        error_after=error.calibration_error(after, survived),
        error_after_ci=error.error_interval(after, survived, held_out.prompt[rows]),
        error_temperature=error_of(predictions.temperatures),
        error_common_temperature=error_of(predictions.common),
        error_perfect=mean,
        error_perfect_high=high,
        skill=error.brier_skill(after, survived),
        before=error.reliability_bins(before, survived),
        after=error.reliability_bins(after, survived),
        **fitted,
    )
