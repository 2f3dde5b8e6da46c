"""The policy of adaptive verification: which shape it chooses from what it is shown."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from draftlab.engine.acceptance_rates import AcceptanceRates
from draftlab.engine.adaptive import AdaptiveVerification, shape_families
from draftlab.engine.adaptive_policy import PLAIN, AdaptivePolicy
from draftlab.engine.admission_costs import AdmissionCosts
from draftlab.engine.step_costs import ShapeFamily, StepCosts
from draftlab.engine.survival import SurvivalModel


def make_policy(costs: dict[ShapeFamily, float], k: int = 3, **settings: Any) -> AdaptivePolicy:
    measured = {family: {1: ms, 8: ms} for family, ms in costs.items()}
    no_time = {k: {1: 0.0} for k in {family.k for family in costs}}
    admissions = AdmissionCosts(no_time, no_time)
    return AdaptivePolicy(
        k, StepCosts(measured), admissions, 10**6, AdaptiveVerification(**settings)
    )


def accepted_drafts(rates: list[float], rows: int, seed: int = 0) -> np.ndarray:
    """Return accepted drafts of rows whose drafts are each accepted at a depth's rate."""
    hits = np.random.default_rng(seed).random((rows, len(rates))) < np.array(rates)
    return hits.cumprod(1).sum(1)


def decide(policy: AdaptivePolicy, rate: float, decisions: int = 20, rows: int = 8) -> ShapeFamily:
    """Show the results of each decision's steps; return the last decision's family."""
    for number in range(decisions):
        decision = policy.decide(rows)
        k, count = decision.family.k, rows * decision.steps
        accepted = accepted_drafts([rate] * k, count, number)
        policy.observe(accepted, np.full(count, k))
    return policy.decide(rows).family


@pytest.mark.parametrize(("rate", "best"), [(0.95, 3), (0.3, 1), (0.02, 0)])
def test_the_best_shape_is_chosen(rate: float, best: int) -> None:
    """Costs of 1, 1.2, 1.4 and 1.6: drafts pay while their survival is above the slope's share."""
    policy = make_policy({ShapeFamily(k): 1 + 0.2 * k for k in range(4)}, trial_share=0.0)
    assert decide(policy, rate) == ShapeFamily(best)


@pytest.mark.parametrize(("host_ms", "best"), [(0.0, 1), (2.0, 3)])
def test_what_the_host_takes_is_no_reason_for_few_drafts(host_ms: float, best: int) -> None:
    policy = make_policy({ShapeFamily(k): 1 + 0.2 * k for k in range(4)}, trial_share=0.0)
    policy.host_ms = host_ms
    assert decide(policy, 0.3) == ShapeFamily(best)


def test_an_admission_overlaps_with_the_step_before_it() -> None:
    """The host launches it while that step runs, and the next step while the prefill runs."""
    costs = AdmissionCosts({1: {1: 0.5, 4: 1.1}}, {1: {1: 0.8, 4: 0.8}})
    assert costs.extra_ms(1, 1, step_ms=0.3, host_ms=0.1) == pytest.approx(0.8 + 0.5 - 0.3)
    assert costs.extra_ms(1, 1, step_ms=2.0, host_ms=0.6) == pytest.approx(0.6)
    assert costs.extra_ms(1, 2, step_ms=2.0, host_ms=0.1) == pytest.approx(0.7)
    assert costs.extra_ms(1, 8, step_ms=2.0, host_ms=0.1) == pytest.approx(2.2)


def test_answers_that_become_short_enter_the_choice() -> None:
    """A step of K = 3 is worth its time, and the first drafts of an admission are not."""
    measured = {ShapeFamily(k): {8: 1 + 0.2 * k} for k in range(4)}
    admissions = AdmissionCosts(
        {k: {1: 0.1 + 2.0 * k} for k in range(4)}, {k: {1: 0.0} for k in range(4)}
    )
    settings = AdaptiveVerification(trial_share=0.0)
    policy = AdaptivePolicy(3, StepCosts(measured), admissions, 10**6, settings)
    assert decide(policy, 0.95) == ShapeFamily(3)
    for _ in range(1000):
        policy.observe_answer(10)
    assert policy.answer_tokens == pytest.approx(10)
    assert decide(policy, 0.95) == ShapeFamily(0)


def test_a_budget_is_chosen_where_it_pays() -> None:
    """Half of the rows accept everything and the others nothing; half of the drafts cost less."""
    families = shape_families(3, (0.5,), budgets=True)
    assert ShapeFamily(3, 0.5) in families
    policy = make_policy({f: 1 + 0.5 * f.k * f.share for f in families})
    chosen = []
    for _ in range(200):
        decision = policy.decide(8)
        k, rows = decision.family.k, 8 * decision.steps
        good = np.arange(rows) % 2 == 0
        accepted, num_drafts = np.where(good, k, 0), np.full(rows, k)
        if decision.family.share == 1:
            policy.observe(accepted, num_drafts)
        if decision.with_confidence or decision.family.share < 1:
            confidence = np.where(good[:, None], 4.0, -4.0) * np.ones(k)
            policy.observe_confidence(accepted, num_drafts, confidence)
        chosen.append(decision.family)
    assert ShapeFamily(3, 0.5) not in chosen[:2]  # nothing is known of confidence yet
    assert set(chosen[-50:]) == {ShapeFamily(3, 0.5)}


def test_the_calibration_is_fitted_to_what_is_accepted() -> None:
    """P(accepted) = σ(0.5 x − 1): the fit finds it from the drafts that were tested alone."""
    random = np.random.default_rng(1)
    survival = SurvivalModel(3, window=6400)
    x = random.normal(0, 2, (6400, 3))
    hits = random.random((6400, 3)) < 1 / (1 + np.exp(1 - 0.5 * x))
    survival.add(hits.cumprod(1).sum(1), np.full(6400, 3), x)
    assert survival.is_known
    for _ in range(3):
        survival.fit()
    tested = survival._tested.sum(0)
    assert tested[2] < 0.3 * tested[0]
    np.testing.assert_allclose(survival.scale, 0.5, atol=0.12)
    np.testing.assert_allclose(survival.bias, -1, atol=0.25)
    expected = (1 / (1 + np.exp(1 - 0.5 * x))).cumprod(1).mean(0)
    np.testing.assert_allclose(survival.survival().mean(0), expected, atol=0.03)


def test_a_confidence_that_is_no_number_leaves_the_calibration_finite() -> None:
    survival, random = SurvivalModel(3, window=512), np.random.default_rng(2)
    for _ in range(100):
        values = random.choice([np.nan, np.inf, -np.inf, 1.0], (8, 3))
        survival.add(random.integers(0, 4, 8), np.full(8, 3), values)
        survival.fit()
    assert np.isfinite([survival.scale, survival.bias]).all()
    assert np.isfinite(survival.survival()).all()


def test_rates_of_acceptance_are_those_of_drafts_that_were_reached() -> None:
    rates, true = AcceptanceRates(3, memory=10**9), [0.8, 0.5, 0.9]
    for seed, k in enumerate([3, 3, 1, 2, 3]):
        accepted = accepted_drafts(true, 4000, seed)
        rates.add(np.minimum(accepted, k), np.full(4000, k))
    np.testing.assert_allclose(rates.rates(), true, atol=0.02)
    np.testing.assert_allclose(rates.expected_tokens(), [1, 1.8, 2.2, 2.56], atol=0.04)
    np.testing.assert_allclose(rates.drafted, [20000, 16000, 12000], rtol=1e-4)


def test_the_standard_error_is_that_of_repeated_estimates() -> None:
    estimates, errors = [], []
    for seed in range(300):
        rates = AcceptanceRates(3, memory=10**9)
        rates.add(accepted_drafts([0.7, 0.6, 0.5], 400, seed), np.full(400, 3))
        estimates.append(rates.expected_tokens()[3])
        errors.append(rates.standard_error(3))
    spread = np.std(estimates) / np.mean(estimates)
    assert np.mean(errors) == pytest.approx(spread, rel=0.15)


@pytest.mark.parametrize("change", [True, False])
def test_a_sudden_change_is_noticed_at_once(change: bool) -> None:
    rates = AcceptanceRates(1, memory=4096)
    for seed in range(40):
        rates.add(accepted_drafts([0.8], 100, seed), np.full(100, 1))
    assert rates.drafted[0] > 2000
    rates.add(accepted_drafts([0.3 if change else 0.8], 100, 99), np.full(100, 1))
    assert (rates.drafted[0] < 200) == change
    assert rates.rates()[0] == pytest.approx(0.3 if change else 0.8, abs=0.12)


def test_rows_without_drafts_tell_nothing() -> None:
    rates = AcceptanceRates(2, memory=100)
    rates.add(np.array([0, 0, 2]), np.array([0, -1, 2]))
    assert rates.drafted.tolist() == [1, 1]


def test_drafting_is_tried_again_for_a_bounded_share_of_the_time() -> None:
    costs = {PLAIN: 1.0, ShapeFamily(1): 3.0}
    policy = make_policy(costs, k=1, trial_share=0.01)
    spent = {0: 0.0, 1: 0.0}
    for number in range(400):
        decision = policy.decide(8)
        k, rows = decision.family.k, 8 * decision.steps
        assert decision.most_rows == (4 if k and number > 5 else None)
        policy.observe(np.zeros(rows, dtype=int), np.full(rows, k))
        if number > 5:
            spent[k] += decision.steps * costs[ShapeFamily(k)]
            spent[k] += policy.catch_up_ms * (k > 0)
    assert 0.004 < spent[1] / spent[0] < 0.02


def test_all_drafts_are_tried_where_few_are_verified() -> None:
    """Later drafts are accepted more often than the first one: trials find it out."""
    policy = make_policy({ShapeFamily(k): 1 + 0.3 * k for k in range(4)})
    rates, decisions = [0.3, 0.3, 0.3], 0
    while decisions < 400:
        decision = policy.decide(8)
        k, rows = decision.family.k, 8 * decision.steps
        accepted = np.minimum(accepted_drafts(rates, rows, decisions), k)
        policy.observe(accepted, np.full(rows, k))
        decisions += 1
        if decisions == 200:
            assert decision.family.k < 3
            rates = [0.5, 1.0, 1.0]
    assert policy.decide(8).family == ShapeFamily(3)
