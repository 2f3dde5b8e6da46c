"""The G-test and its power, against their definitions and simulated draws."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from draftlab.evaluate.certificate.gtest import g_test, power, samples_for

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
    needed = samples_for(0.99, np.array([0.5, 0.5, 0.0]), np.array([0.495, 0.495, 0.01]), 1e-3)
    assert needed == pytest.approx(math.log(0.01) / math.log(0.99), rel=0.02)


@pytest.mark.parametrize("target_power", [0.9, 0.99])
def test_power_agrees_with_draws(target_power: float) -> None:
    level = 1e-3
    needed = samples_for(target_power, CELLS, TILTED, level)
    assert needed is not None
    draws = np.random.default_rng(2).multinomial(needed, TILTED, 2000)
    rejected = np.mean([g_test(counts, CELLS).p_value < level for counts in draws])
    assert abs(rejected - target_power) < 0.02
    assert power(needed // 2, CELLS, TILTED, level) < target_power
    assert samples_for(target_power, CELLS, TILTED, level, limit=needed // 2) is None


def test_equal_distributions_have_no_sample_size() -> None:
    assert samples_for(0.99, CELLS, CELLS, 1e-3, limit=10**6) is None


def test_a_single_cell_never_rejects() -> None:
    result = g_test(np.array([2, 1]), np.array([0.5, 0.5]))  # both cells are rare and pooled
    assert (result.statistic, result.freedom, result.p_value) == (0.0, 1, 1.0)


def test_different_cells_are_refused() -> None:
    with pytest.raises(ValueError, match="same cells"):
        g_test(np.ones(3), np.ones(4) / 4)
