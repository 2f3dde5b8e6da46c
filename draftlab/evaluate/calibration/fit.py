"""Fits of confidence to what was accepted, from left to right (methods §6.7).

A draft's calibrated probability is σ(slope · s + intercept), with s its raw confidence's logit. The
survival of position k is the product over the drafts up to k. Each position is fitted on whether
the first k + 1 drafts were accepted, with the fits of the positions before it kept, so that errors
of a prefix do not add up. The drafts of a step depend on each other, which a product cannot say;
beta calibration (Kull et al., 2017) corrects the product at each position.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit, logit

from draftlab.evaluate.calibration.blocks import DraftBlocks
from draftlab.evaluate.calibration.error import calibration_error

Beta = tuple[float, float, float]
"""Coefficients (a, b, c) of beta calibration: σ(a · ln p − b · ln(1 − p) + c)."""
IDENTITY: Beta = (1.0, 1.0, 0.0)
TEMPERATURES = np.logspace(-1, 1, 41)
"""Temperatures that are tried, those of SGLang's fit (servers §13)."""
RIDGE = 1e-3
"""Weight of the squared distance from slope 1 and intercept 0, against the summed log-loss. It
decides where all outcomes are equal."""
_BOUNDS = ((0.0, 20.0), (-20.0, 20.0))
"""Bounds of slope and intercept: a larger raw confidence never means a smaller probability."""
_SMALLEST = 1e-12


def survival(
    confidence: np.ndarray, slopes: Sequence[float], intercepts: Sequence[float]
) -> np.ndarray:
    """Return the probability that the first k + 1 drafts are accepted, float64 [N, K].

    Args:
        confidence: logits [N, K].
        slopes, intercepts: of each position.
    """
    return np.cumprod(expit(confidence * np.array(slopes) + np.array(intercepts)), axis=1)


def corrected_survival(products: np.ndarray, betas: Sequence[Beta]) -> np.ndarray:
    """Return products [N, K] after beta calibration; no position survives likelier than the last.

    Args:
        products: `survival`.
        betas: of each position.
    """
    columns = [
        expit(_beta_features(products[:, k]) @ np.array(beta)) for k, beta in enumerate(betas)
    ]
    return np.minimum.accumulate(np.stack(columns, axis=1), axis=1)


def _beta_features(products: np.ndarray) -> np.ndarray:
    """Return (ln p, −ln(1 − p), 1) of probabilities [N], [N, 3]."""
    p = products.clip(_SMALLEST, 1 - _SMALLEST)
    return np.stack([np.log(p), -np.log1p(-p), np.ones_like(p)], axis=1)


def fit_betas(blocks: DraftBlocks, products: np.ndarray) -> list[Beta]:
    """Return each position's beta calibration of the products [N, K], by maximum likelihood."""
    betas: list[Beta] = []
    for position in range(blocks.k):
        rows, survived = blocks.survivors(position)
        features = _beta_features(products[rows, position])

        def loss(
            beta: np.ndarray, features: np.ndarray = features, survived: np.ndarray = survived
        ) -> tuple[float, np.ndarray]:
            logits = features @ beta
            distance = beta - np.array(IDENTITY)
            value = np.logaddexp(0.0, np.where(survived, -logits, logits)).sum()
            gradient = features.T @ (expit(logits) - survived)
            return (value + RIDGE * float(distance @ distance), gradient + 2 * RIDGE * distance)

        bounds = ((0.0, None), (0.0, None), (None, None))
        fitted = minimize(loss, IDENTITY, jac=True, method="L-BFGS-B", bounds=bounds)
        betas.append((float(fitted.x[0]), float(fitted.x[1]), float(fitted.x[2])))
    return betas


def fit_logistic(blocks: DraftBlocks) -> tuple[list[float], list[float]]:
    """Return slope and intercept of each position, by maximum likelihood of the survival."""
    slopes: list[float] = []
    intercepts: list[float] = []
    prefix = np.ones(len(blocks))
    for position in range(blocks.k):
        rows, survived = blocks.survivors(position)
        logits = blocks.confidence[:, position]
        slope, intercept = _fit_position(logits[rows], prefix[rows], survived)
        slopes.append(slope)
        intercepts.append(intercept)
        prefix = prefix * expit(slope * logits + intercept)
    return slopes, intercepts


def _fit_position(
    logits: np.ndarray, prefix: np.ndarray, survived: np.ndarray
) -> tuple[float, float]:
    """Return the slope and intercept with the largest likelihood of prefix · σ(·)."""

    def loss(parameters: np.ndarray) -> tuple[float, np.ndarray]:
        slope, intercept = parameters
        chance = expit(slope * logits + intercept)
        joint = (prefix * chance).clip(_SMALLEST, 1 - _SMALLEST)
        value = -np.where(survived, np.log(joint), np.log1p(-joint)).sum()
        # d(log-loss)/d(logit of the draft's chance)
        gradient = np.where(survived, chance - 1, joint * (1 - chance) / (1 - joint))
        distance = parameters - np.array([1.0, 0.0])
        return (
            value + RIDGE * float(distance @ distance),
            np.array([gradient @ logits, gradient.sum()]) + 2 * RIDGE * distance,
        )

    # The loss of a survival is not convex: far outside, where all chances are 0 or 1, it is flat.
    # One search starts at the raw confidence, the other at the mean acceptance.
    mean = survived.sum() / max(prefix.sum(), 1.0)
    starts = (1.0, 0.0), (0.0, float(logit(np.clip(mean, 1e-3, 1 - 1e-3))))
    searches = [
        minimize(loss, start, jac=True, method="L-BFGS-B", bounds=_BOUNDS) for start in starts
    ]
    best = min(searches, key=lambda search: search.fun)
    return float(best.x[0]), float(best.x[1])


def fit_temperatures(blocks: DraftBlocks) -> list[float]:
    """Return each position's temperature by sequential temperature scaling.

    The temperature of position k has the smallest calibration error of Π_{j≤k} σ(s_j / T_j); of
    equal ones the smallest temperature (DSpark, arXiv 2607.05147).
    """
    temperatures: list[float] = []
    prefix = np.ones(len(blocks))
    for position in range(blocks.k):
        rows, survived = blocks.survivors(position)
        logits = blocks.confidence[:, position]
        tried = [prefix[rows] * expit(logits[rows] / t) for t in TEMPERATURES]
        errors = [calibration_error(predicted, survived) for predicted in tried]
        temperatures.append(float(TEMPERATURES[int(np.argmin(errors))]))
        prefix = prefix * expit(logits / temperatures[-1])
    return temperatures


def fit_common_temperature(blocks: DraftBlocks) -> float:
    """Return the one temperature with the smallest mean calibration error over the positions."""
    errors = []
    for temperature in TEMPERATURES:
        predicted = np.cumprod(expit(blocks.confidence / temperature), axis=1)
        of_positions = []
        for position in range(blocks.k):
            rows, survived = blocks.survivors(position)
            of_positions.append(calibration_error(predicted[rows, position], survived))
        errors.append(np.mean(of_positions))
    return float(TEMPERATURES[int(np.argmin(errors))])
