"""Fits from left to right: known parameters, and independent searches for the same optimum."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import expit

from draftlab.evaluate.calibration.blocks import DraftBlocks
from draftlab.evaluate.calibration.error import calibration_error, perfect_error
from draftlab.evaluate.calibration.fit import (
    TEMPERATURES,
    corrected_survival,
    fit_betas,
    fit_logistic,
    fit_temperatures,
    survival,
)
from tests.evaluate.calibration.test_error import plain_error
from tests.helpers.draft_blocks import simulate

SLOPES, INTERCEPTS = [0.5, 1.0, 1.6], [0.4, -0.3, 0.1]


def test_a_fit_maximises_the_likelihood_of_the_prefix() -> None:
    """Against a search without gradients, over Bernoulli variables written one by one."""
    blocks = simulate(SLOPES, INTERCEPTS, blocks=400)
    slopes, intercepts = fit_logistic(blocks)
    prefix = [1.0] * 400
    for k in range(3):
        logits, survived = blocks.confidence[:, k].tolist(), (blocks.accepted > k).tolist()

        def loss(
            x: np.ndarray,
            logits: list[float] = logits,
            survived: list[bool] = survived,
            prefix: list[float] = prefix,
        ) -> float:
            total = 1e-3 * ((x[0] - 1) ** 2 + x[1] ** 2)
            for s, y, before in zip(logits, survived, prefix, strict=True):
                p = before / (1 + math.exp(-(x[0] * s + x[1])))
                total -= math.log(p if y else 1 - p)
            return total

        found = minimize(loss, (0.8, 0.1), method="Nelder-Mead", options={"xatol": 1e-6})
        assert (slopes[k], intercepts[k]) == pytest.approx(tuple(found.x), abs=2e-3)
        prefix = [
            p / (1 + math.exp(-(slopes[k] * s + intercepts[k])))
            for p, s in zip(prefix, logits, strict=True)
        ]


def test_temperatures_are_those_of_a_search_over_the_grid() -> None:
    blocks = simulate([0.5, 0.8, 0.25], [0.0] * 3, blocks=3000)
    expected, prefix = [], [1.0] * 3000
    for k in range(3):
        logits, survived = blocks.confidence[:, k].tolist(), (blocks.accepted > k).tolist()
        errors = {}
        for i in range(41):
            t = 10 ** (-1 + i / 20)
            chances = [p / (1 + math.exp(-s / t)) for p, s in zip(prefix, logits, strict=True)]
            errors[t] = plain_error(chances, survived)
        best = min(errors, key=lambda t: errors[t])
        expected.append(best)
        prefix = [p / (1 + math.exp(-s / best)) for p, s in zip(prefix, logits, strict=True)]
    assert fit_temperatures(blocks) == pytest.approx(expected)
    assert len(TEMPERATURES) == 41
    assert (TEMPERATURES[0], TEMPERATURES[-1]) == pytest.approx((0.1, 10))


def dependent(blocks: int) -> DraftBlocks:
    """Return steps whose drafts share a luck that no confidence shows."""
    generator = np.random.default_rng(4)
    confidence = generator.normal(0.5, 1.5, (blocks, 3))
    luck = generator.normal(0.0, 2.0, (blocks, 1))
    run = generator.random((blocks, 3)) < expit(confidence + luck)
    accepted = np.cumprod(run, axis=1).sum(1)
    return DraftBlocks(confidence, np.full(blocks, 3), accepted, generator.integers(0, 99, blocks))


def test_a_product_of_dependent_chances_is_corrected() -> None:
    blocks, other = dependent(60_000).split()
    slopes, intercepts = fit_logistic(blocks)
    betas = fit_betas(blocks, survival(blocks.confidence, slopes, intercepts))
    products = survival(other.confidence, slopes, intercepts)
    corrected = corrected_survival(products, betas)
    assert (np.diff(corrected, axis=1) <= 0).all()
    rows, survived = other.survivors(2)
    before = calibration_error(products[rows, 2], survived)
    after = calibration_error(corrected[rows, 2], survived)
    perfect = perfect_error(corrected[rows, 2])
    assert before > 2.4 * perfect
    assert after < 1.4 * perfect


def test_beta_calibration_maximises_its_likelihood() -> None:
    blocks = dependent(500)
    products = survival(blocks.confidence, [1.0] * 3, [0.0] * 3)
    for k, beta in enumerate(fit_betas(blocks, products)):
        chances, survived = products[:, k].tolist(), (blocks.accepted > k).tolist()

        def loss(
            x: np.ndarray, chances: list[float] = chances, survived: list[bool] = survived
        ) -> float:
            total = 1e-3 * ((x[0] - 1) ** 2 + (x[1] - 1) ** 2 + x[2] ** 2)
            for p, y in zip(chances, survived, strict=True):
                odds = p ** x[0] / (1 - p) ** x[1] * math.exp(x[2])
                total -= math.log((odds if y else 1) / (1 + odds))
            return total if min(x[:2]) >= 0 else math.inf

        found = minimize(loss, (0.8, 0.8, 0.1), method="Nelder-Mead", options={"maxiter": 2000})
        assert loss(np.array(beta)) <= found.fun + 1e-4
    exact = corrected_survival(products, [(1.0, 1.0, 0.0)] * 3)
    np.testing.assert_allclose(exact, products, rtol=1e-9)


def test_missing_drafts_are_not_rejections() -> None:
    """Blocks with fewer drafts say nothing about later ones; counted as rejected they would."""
    whole = simulate(SLOPES, INTERCEPTS, blocks=60_000)
    short = simulate(SLOPES, INTERCEPTS, blocks=60_000, short=0.6, seed=1)
    for fitted in (fit_logistic(whole), fit_logistic(short)):
        assert fitted[0] == pytest.approx(SLOPES, rel=0.12)
        assert fitted[1] == pytest.approx(INTERCEPTS, abs=0.12)
    rejected = DraftBlocks(
        short.confidence, np.full_like(short.num_drafts, 3), short.accepted, short.prompt
    )
    assert fit_logistic(rejected)[1][2] < INTERCEPTS[2] - 0.3


@pytest.mark.parametrize("accepted", [0, 2])
def test_equal_outcomes_have_a_finite_fit(accepted: int) -> None:
    n = 300
    confidence = np.random.default_rng(0).normal(size=(n, 2))
    blocks = DraftBlocks(confidence, np.full(n, 2), np.full(n, accepted), np.arange(n))
    slopes, intercepts = fit_logistic(blocks)
    predicted = survival(confidence, slopes, intercepts)[:, 0].mean()
    assert abs(predicted - accepted / 2) < 0.02
    assert all(np.isfinite([*slopes, *intercepts]))
    assert all(slope >= 0 for slope in slopes)


def test_a_position_without_drafts_is_not_corrected() -> None:
    """Without outcomes the ridge keeps the logits as they are."""
    blocks = DraftBlocks(np.zeros((4, 2)), *[np.ones(4, dtype=np.int64)] * 3)
    assert fit_betas(blocks, np.full((4, 2), 0.5))[1] == (1.0, 1.0, 0.0)
    slopes, intercepts = fit_logistic(blocks)
    assert (slopes[1], intercepts[1]) == (1.0, 0.0)
