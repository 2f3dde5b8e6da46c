"""Simulated verify steps whose acceptance given their confidence is known; their calibration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.special import expit

from draftlab.evaluate.calibration.blocks import DraftBlocks
from draftlab.evaluate.calibration.calibrate import calibrate
from draftlab.evaluate.calibration.result import CalibratedPosition, Calibration


def simulate(
    slopes: Sequence[float],
    intercepts: Sequence[float],
    *,
    blocks: int = 20_000,
    prompts: int = 200,
    short: float = 0.0,
    seed: int = 0,
) -> DraftBlocks:
    """Return blocks whose draft k is accepted with probability σ(slope_k · s_k + intercept_k).

    Args:
        short: share of the blocks that have a random, smaller number of drafts.
        seed: seed of a local generator.
    """
    generator = np.random.default_rng(seed)
    k = len(slopes)
    confidence = generator.normal(0.9, 1.6, (blocks, k))
    chance = expit(confidence * np.array(slopes) + np.array(intercepts))
    run = np.cumprod(generator.random((blocks, k)) < chance, axis=1).sum(1)
    num_drafts = np.where(generator.random(blocks) < short, generator.integers(1, k + 1, blocks), k)
    return DraftBlocks(
        confidence,
        num_drafts,
        np.minimum(run, num_drafts),
        generator.integers(0, prompts, blocks),
    )


def calibrated(
    blocks: DraftBlocks, source: Any = "draft probability", **conditions: Any
) -> Calibration:
    """Return the calibration of blocks, under conditions that differ from a toy's."""
    fields = {
        "engine": "draftlab",
        "head": "runs/quickstart/head",
        "head_sha256": None,
        "temperature": 0.0,
        "draft_probs": False,
        "suite": "toy",
        "suite_sha256": "0" * 64,
        "confidence_temperature": None if source == "confidence head" else 1.0,
    }
    return calibrate(blocks, source, k=blocks.k, **fields | conditions)


def explained(position: CalibratedPosition) -> float:
    """Return the share of the outcomes' variance that the calibrated predictions explain (their
    Brier skill), with each bin's mean prediction in place of its predictions.
    """
    counts, predicted, observed = (
        np.array([getattr(b, name) for b in position.after])
        for name in ("count", "predicted", "observed")
    )
    mean = counts @ observed / counts.sum()
    gain = counts @ ((observed - mean) ** 2 - (predicted - observed) ** 2)
    return float(gain / (counts.sum() * mean * (1 - mean)))
