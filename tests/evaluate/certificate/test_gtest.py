"""The G-test and what it detects, against their definitions and simulated draws."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from draftlab.evaluate.certificate.exact import detectable, g_test

CELLS = np.random.default_rng(3).dirichlet(np.full(64, 0.7))
TILTED = CELLS * (1 + 0.1 * np.random.default_rng(4).standard_normal(64))
TILTED /= TILTED.sum()


def test_the_statistic_pools_rare_cells() -> None:
    counts = np.random.default_rng(0).multinomial(2000, CELLS)
    rare = CELLS * 2000 < 5
    assert 0 < rare.sum() < 64  # otherwise nothing is pooled
    expected = np.append(CELLS[~rare], CELLS[rare].sum()) * 2000
    pooled = np.append(counts[~rare], counts[rare].sum())
    statistic = 2 * np.sum(pooled * np.log(pooled / expected))
    result = g_test(counts.reshape(8, 8), CELLS.reshape(8, 8))
    assert result.statistic == pytest.approx(statistic, rel=1e-9)
    assert result.freedom == (~rare).sum()
    assert result.p_value == pytest.approx(stats.chi2.sf(statistic, result.freedom), rel=1e-9)


def test_p_values_are_uniform() -> None:
    draws = np.random.default_rng(1).multinomial(5000, CELLS, 1500)
    p_values = [g_test(counts, CELLS).p_value for counts in draws]
    assert stats.kstest(p_values, "uniform").pvalue > 1e-3


def test_an_impossible_outcome_rejects() -> None:
    result = g_test(np.array([5000, 5000, 1]), np.array([0.5, 0.5, 0.0]))
    assert (result.statistic, result.p_value) == (math.inf, 0.0)


@pytest.mark.parametrize("power", [0.9, 0.99])
def test_the_detectable_divergence_agrees_with_draws(power: float) -> None:
    level, divergence = 1e-3, float(np.sum(TILTED * np.log(TILTED / CELLS)))
    samples = round(detectable(1, 63, level, power) / divergence)
    assert detectable(samples, 63, level, power) == pytest.approx(divergence, rel=1e-3)
    draws = np.random.default_rng(2).multinomial(samples, TILTED, 2000)
    rejected = np.mean([g_test(counts, CELLS).p_value < level for counts in draws])
    assert abs(rejected - power) < 0.03


def test_a_single_cell_never_rejects() -> None:
    result = g_test(np.array([2, 1]), np.array([0.5, 0.5]))  # both cells are rare and pooled
    assert (result.statistic, result.freedom, result.p_value) == (0.0, 1, 1.0)
