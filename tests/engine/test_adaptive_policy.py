"""The policy of adaptive verification: which shape it chooses from what it is shown."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from draftlab.engine.adaptive import AdaptivePolicy, AdaptiveVerification, shape_families
from draftlab.engine.step_costs import ShapeFamily, StepCosts


def make_policy(costs: dict[ShapeFamily, float], k: int = 3, **settings: Any) -> AdaptivePolicy:
    measured = {family: {1: ms, 8: ms} for family, ms in costs.items()}
    return AdaptivePolicy(k, StepCosts(measured), AdaptiveVerification(**settings))


def show(policy: AdaptivePolicy, rate: float, logit: float, steps: int = 200, k: int = 3) -> None:
    """Show steps of 8 rows whose drafts are each accepted at this rate."""
    random = np.random.default_rng(0)
    for _ in range(steps):
        hits = random.random((8, k)) < rate
        accepted = np.where(hits.all(1), k, hits.argmin(1))
        policy.observe(accepted, np.full(8, k), np.full((8, k), logit))
        policy.choose(8)


@pytest.mark.parametrize(("rate", "best"), [(0.95, 3), (0.3, 1), (0.02, 0)])
def test_the_best_shape_is_chosen(rate: float, best: int) -> None:
    """Costs of 1, 1.2, 1.4 and 1.6: drafts pay while their survival is above the slope's share."""
    policy = make_policy({ShapeFamily(k): 1 + 0.2 * k for k in range(4)}, explore_every=10**9)
    show(policy, rate, logit=0.0)  # the confidence as it is says 0.5
    assert policy.choose(8)[0] == ShapeFamily(best)


def test_a_budget_is_chosen_where_it_pays() -> None:
    """Half of the rows accept everything and the others nothing; half of the drafts cost less."""
    families = shape_families(3, (0.5,), budgets=True)
    assert ShapeFamily(3, 0.5) in families
    policy = make_policy({f: 1 + 0.5 * f.k * f.share for f in families})
    for _ in range(200):
        accepted = np.array([3, 0] * 4)
        policy.observe(accepted, np.full(8, 3), np.where(accepted[:, None], 4.0, -4.0) * np.ones(3))
        policy.choose(8)
    assert policy.choose(8)[0] == ShapeFamily(3, 0.5)


def test_the_calibration_is_fitted_to_what_is_accepted() -> None:
    """P(accepted) = σ(0.5 x − 1): the fit finds it from the drafts that were tested alone."""
    random = np.random.default_rng(1)
    policy = make_policy({ShapeFamily(3): 1.0}, window=8192)
    for _ in range(800):
        x = random.normal(0, 2, (8, 3))
        hits = random.random((8, 3)) < 1 / (1 + np.exp(1 - 0.5 * x))
        accepted = np.where(hits.all(1), 3, hits.argmin(1))
        policy.observe(accepted, np.full(8, 3), x)
        policy.choose(8)
    tested = policy._tested.sum(0)
    assert tested[2] < 0.3 * tested[0]
    np.testing.assert_allclose(policy.scale, 0.5, atol=0.12)
    np.testing.assert_allclose(policy.bias, -1, atol=0.25)


def test_a_confidence_that_is_no_number_leaves_the_calibration_finite() -> None:
    policy = make_policy({ShapeFamily(k): 1.0 + k for k in range(4)})
    random = np.random.default_rng(2)
    for _ in range(100):
        accepted = random.integers(0, 4, 8)
        values = random.choice([np.nan, np.inf, -np.inf, 1.0], (8, 3))
        policy.observe(accepted, np.full(8, 3), values)
        policy.choose(8)
    assert np.isfinite([policy.scale, policy.bias]).all()
    assert np.isfinite(list(policy._expected().values())).all()


def test_drafting_is_tried_again() -> None:
    policy = make_policy(
        {ShapeFamily(0): 1.0, ShapeFamily(1): 3.0}, k=1, explore_every=2, interval=32
    )
    show(policy, 0.5, 0.0, steps=20, k=1)
    choices = [policy.choose(8)[0].k for _ in range(400)]
    assert choices.count(1) in range(32, 49)  # 8 steps of every 72
