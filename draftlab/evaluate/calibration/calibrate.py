"""Calibrate a row's confidence on half of its prompts, and measure it on the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy.special import expit

from draftlab.errors import UserError
from draftlab.evaluate.calibration import error, fit
from draftlab.evaluate.calibration.blocks import DraftBlocks
from draftlab.evaluate.calibration.result import CalibratedPosition, Calibration, Saving, Source
from draftlab.evaluate.workload import EngineResults, Workload
from draftlab.files import known_sha256
from draftlab.heads.folder import WEIGHTS
from draftlab.intervals import MIN_INTERVAL_PROMPTS

SURVIVAL_THRESHOLD = 0.2
"""Least calibrated survival of the drafts that are verified, for the stated saving."""
LARGEST_LOSS = 0.02
"""Share of the accepted drafts that the chosen cutoff loses at most."""
CUTOFFS = np.arange(0.0, 1.0, 0.01)
MIN_BLOCKS = 100
"""Fewest blocks of each half: fewer say nothing about any bin."""


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
    confidence, raw = held_out.confidence, ([1.0] * blocks.k, [0.0] * blocks.k)
    slopes, intercepts = fit.fit_logistic(fitted)
    betas = fit.fit_betas(fitted, fit.survival(fitted.confidence, slopes, intercepts))
    after = fit.corrected_survival(fit.survival(confidence, slopes, intercepts), betas)
    predictions = {"before": fit.survival(confidence, *raw), "after": after}
    temperatures: list[float] | None = None
    common: float | None = None
    if source == "confidence head":
        temperatures, common = fit.fit_temperatures(fitted), fit.fit_common_temperature(fitted)
        scaled = expit(confidence / np.array(temperatures)), expit(confidence / common)
        names = ("temperature", "common_temperature")
        predictions |= zip(names, (np.cumprod(one, axis=1) for one in scaled), strict=True)
    cutoff = largest_cutoff(fitted)
    survived = verified_by_survival(held_out, after, SURVIVAL_THRESHOLD)
    return Calibration(
        source=source,
        fitted_blocks=len(fitted),
        prompts=held_out.num_prompts,
        blocks=len(held_out),
        positions=[
            _position(held_out, k, predictions, temperature=temperatures and temperatures[k])
            for k in range(blocks.k)
        ],
        common_temperature=common,
        survival_saving=threshold_saving(held_out, survived, SURVIVAL_THRESHOLD),
        cutoff_saving=threshold_saving(held_out, verified_by_cutoff(held_out, cutoff), cutoff),
        cutoff=cutoff,
        **conditions,
    )


def _position(
    held_out: DraftBlocks, k: int, predictions: Mapping[str, np.ndarray], **fitted: Any
) -> CalibratedPosition:
    """Return position k with its errors; `predictions` are survivals [N, K]."""
    rows, survived = held_out.survivors(k)
    at = {name: survival[rows, k] for name, survival in predictions.items()}
    errors = {f"error_{name}": error.calibration_error(p, survived) for name, p in at.items()}
    return CalibratedPosition(
        error_perfect=error.perfect_error(at["after"]),
        before=error.reliability_bins(at["before"], survived),
        after=error.reliability_bins(at["after"], survived),
        **errors | fitted,
    )


def verified_by_survival(blocks: DraftBlocks, survival: np.ndarray, threshold: float) -> np.ndarray:
    """Return the drafts that are verified, int64 [N]: those with at least this survival [N, K]."""
    return ((survival >= threshold) & blocks.has_draft).sum(1)


def verified_by_cutoff(blocks: DraftBlocks, threshold: float) -> np.ndarray:
    """Return the drafts before the first whose raw confidence is below the threshold, int64 [N]."""
    confident = (expit(blocks.confidence) >= threshold) & blocks.has_draft
    return np.cumprod(confident, axis=1).sum(1)


def threshold_saving(blocks: DraftBlocks, verified: np.ndarray, threshold: float) -> Saving:
    """Return what verifying the first `verified` drafts [N] of each block saves and loses."""
    return Saving(
        threshold=threshold,
        not_verified=1 - verified.sum() / blocks.num_drafts.sum(),
        lost=lost_drafts(blocks, verified).sum() / max(blocks.accepted.sum(), 1),
    )


def lost_drafts(blocks: DraftBlocks, verified: np.ndarray) -> np.ndarray:
    """Return the accepted drafts behind the first `verified` ones, int64 [N]."""
    return (blocks.accepted - verified).clip(0)


def largest_cutoff(blocks: DraftBlocks) -> float:
    """Return the largest of `CUTOFFS` that loses at most `LARGEST_LOSS`."""
    allowed = LARGEST_LOSS * blocks.accepted.sum()
    allowed_cutoffs = [
        cutoff
        for cutoff in CUTOFFS
        if lost_drafts(blocks, verified_by_cutoff(blocks, cutoff)).sum() <= allowed
    ]
    return round(float(max(allowed_cutoffs)), 2)


def calibrate_rows(workload: Workload, results: EngineResults) -> list[Calibration]:
    """Return a calibration for each drafting configuration and temperature, in the rows' order.

    A row with too few steps has none, and a warning is printed.

    Args:
        results: of draftlab's engine, whose generations have their drafts' confidence.
    """
    calibrations = []
    for t in workload.settings.temperatures:
        for config in workload.configs_at(t):
            if config.head is None:
                continue
            named = config.head
            blocks = DraftBlocks.from_generations(results.generations[t, config])
            own = getattr(named.head.config, "confidence", False)
            drafts_at = config.confidence_temperature(t)
            try:
                calibration = calibrate(
                    blocks,
                    "confidence head" if own else "draft probability",
                    confidence_temperature=None if own else drafts_at,
                    engine=results.engine,
                    head=named.name,
                    head_sha256=named.folder and known_sha256(named.folder / WEIGHTS),
                    temperature=t,
                    k=config.k,
                    draft_probs=config.draft_probs,
                    suite=workload.suite.name,
                    suite_sha256=workload.suite.sha256,
                )
            except UserError as error:
                workload.monitor.say(
                    f"warning: {config.name_at(t)} at T = {t:g} is not calibrated: {error.what}; "
                    f"{error.do}"
                )
                continue
            calibrations.append(calibration)
    return calibrations
