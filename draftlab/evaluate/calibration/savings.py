"""Count the drafts that a threshold of their chance saves, and the accepted ones that it loses."""

from __future__ import annotations

import numpy as np
from scipy.special import expit

from draftlab.evaluate.calibration.blocks import DraftBlocks
from draftlab.evaluate.calibration.result import Saving
from draftlab.intervals import ratio_interval, sums_by_prompt

THRESHOLDS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7)
LARGEST_LOSS = 0.02
"""Share of the accepted drafts that the chosen cutoff loses at most."""
CUTOFFS = np.arange(0.0, 1.0, 0.01)


def verified_by_survival(blocks: DraftBlocks, survival: np.ndarray, threshold: float) -> np.ndarray:
    """Return the drafts that are verified, int64 [N]: those with at least this survival [N, K]."""
    return ((survival >= threshold) & blocks.has_draft).sum(1)


def verified_by_cutoff(blocks: DraftBlocks, threshold: float) -> np.ndarray:
    """Return the drafts before the first whose raw confidence is below the threshold, int64 [N]."""
    confident = (expit(blocks.confidence) >= threshold) & blocks.has_draft
    return np.cumprod(confident, axis=1).sum(1)


def saving(blocks: DraftBlocks, verified: np.ndarray, threshold: float) -> Saving:
    """Return what verifying the first `verified` drafts [N] of each block saves and loses."""
    drafts, accepted, skipped, lost = sums_by_prompt(
        blocks.prompt,
        blocks.num_drafts,
        blocks.accepted,
        blocks.num_drafts - verified,
        lost_drafts(blocks, verified),
    )
    return Saving(
        threshold=threshold,
        not_verified=skipped.sum() / drafts.sum(),
        not_verified_ci=ratio_interval(skipped, drafts),
        lost=lost.sum() / max(accepted.sum(), 1.0),
        lost_ci=ratio_interval(lost, accepted),
    )


def lost_drafts(blocks: DraftBlocks, verified: np.ndarray) -> np.ndarray:
    """Return the accepted drafts behind the first `verified` ones, int64 [N]."""
    return (blocks.accepted - verified).clip(0)


def largest_cutoff(blocks: DraftBlocks, largest_loss: float = LARGEST_LOSS) -> float:
    """Return the largest of `CUTOFFS` that loses at most this share of the accepted drafts."""
    allowed = largest_loss * blocks.accepted.sum()
    allowed_cutoffs = [
        cutoff
        for cutoff in CUTOFFS
        if lost_drafts(blocks, verified_by_cutoff(blocks, cutoff)).sum() <= allowed
    ]
    return round(float(max(allowed_cutoffs)), 2)
