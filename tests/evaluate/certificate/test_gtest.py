"""The G-test and its power, against scipy and against draws."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from draftlab.evaluate.certificate.gtest import (
    chi2_isf,
    chi2_sf,
    g_test,
    noncentral_chi2_sf,
    power,
    samples_for,
)

CELLS = np.random.default_rng(3).dirichlet(np.full(64, 0.7))
TILTED = CELLS * (1 + 0.1 * np.random.default_rng(4).standard_normal(64))
TILTED /= TILTED.sum()


@pytest.mark.parametrize("freedom", [1, 7, 64, 255])
@pytest.mark.parametrize("level", [0.5, 1e-3, 2.5e-4, 1e-8])
def test_chi_square_is_scipys(freedom: int, level: float) -> None:
    border = chi2_isf(level, freedom)
    assert border == pytest.approx(stats.chi2.isf(level, freedom), rel=1e-9)
    assert chi2_sf(border, freedom) == pytest.approx(level, rel=1e-9)
    for noncentrality in (0.0, 0.5, 20.0, 300.0, 5000.0):
        expected = stats.ncx2.sf(border, freedom, noncentrality) if noncentrality else level
        found = noncentral_chi2_sf(border, freedom, noncentrality)
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_statistic_is_scipys_with_rare_cells_pooled() -> None:
    seen = np.random.default_rng(0).multinomial(2000, CELLS)
    rare = CELLS * 2000 < 5
    assert 0 < rare.sum() < 64  # or nothing is pooled
    expected = np.append(CELLS[~rare], CELLS[rare].sum()) * 2000
    pooled = np.append(seen[~rare], seen[rare].sum())
    by_scipy = stats.power_divergence(pooled, expected, lambda_="log-likelihood")
    found = g_test(seen.reshape(8, 8), CELLS.reshape(8, 8))
    assert found.statistic == pytest.approx(by_scipy.statistic, rel=1e-9)
    assert found.p_value == pytest.approx(by_scipy.pvalue, rel=1e-6)
    assert found.freedom == (~rare).sum()


def test_p_values_are_uniform() -> None:
    draws = np.random.default_rng(1).multinomial(5000, CELLS, 1500)
    found = [g_test(seen, CELLS).p_value for seen in draws]
    assert stats.kstest(found, "uniform").pvalue > 1e-3


def test_an_impossible_outcome_is_certain_rejection() -> None:
    found = g_test(np.array([5000, 5000, 1]), np.array([0.5, 0.5, 0.0]))
    assert (found.statistic, found.p_value) == (math.inf, 0.0)
    needed = samples_for(0.99, np.array([0.5, 0.5, 0.0]), np.array([0.495, 0.495, 0.01]), 1e-3)
    assert needed == pytest.approx(math.log(0.01) / math.log(0.99), rel=0.02)


@pytest.mark.parametrize("wanted", [0.9, 0.99])
def test_power_is_what_draws_show(wanted: float) -> None:
    level = 1e-3
    needed = samples_for(wanted, CELLS, TILTED, level)
    assert needed is not None
    draws = np.random.default_rng(2).multinomial(needed, TILTED, 2000)
    rejected = np.mean([g_test(seen, CELLS).p_value < level for seen in draws])
    assert abs(rejected - wanted) < 0.02
    assert power(needed // 2, CELLS, TILTED, level) < wanted
    assert samples_for(wanted, CELLS, TILTED, level, limit=needed // 2) is None


def test_equal_distributions_are_never_told_apart() -> None:
    assert samples_for(0.99, CELLS, CELLS, 1e-3, limit=10**6) is None


def test_different_cells_are_refused() -> None:
    with pytest.raises(ValueError, match="same cells"):
        g_test(np.ones(3), np.ones(4) / 4)
