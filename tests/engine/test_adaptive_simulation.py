"""Decisions on simulated steps: what is lost against the best fixed K, decisions and trials in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from draftlab.engine.adaptive_policy import AdaptivePolicy
from draftlab.engine.step import StepShape
from tests.helpers.simulated_steps import ENDLESS, Machine, SimulatedEngine

K = 7
FIXED = 0, 1, 2, 3, 5, 7
STEPS = 10_000  # of plain decoding, whose time a simulation lasts


def device_ms(base: float, token: float, draft: float) -> Callable[[StepShape, int], float]:
    """Return the time of a step: weights, verified tokens, passes of the head, confidence."""

    def ms(shape: StepShape, rows: int) -> float:
        verified = rows * shape.k if shape.budget is None else shape.budget
        head = draft * (shape.k + 1 if shape.k else 0)
        return base + token * verified + head + 0.02 * base * shape.confidence

    return ms


SHORT, LONG = device_ms(0.2, 0.002, 0.03), device_ms(5.0, 0.02, 0.25)
MANY = device_ms(9.0, 0.02, 0.3)
RISING = [0.73, 0.75, 0.78, 0.8, 0.8, 0.8, 0.8]


def admission_ms(base: float, draft: float) -> Callable[[int], float]:
    """Return the time of an admission: the prompt, and passes of the head."""
    return lambda k: base + (draft * (k + 1) if k else 0)


def regret(
    device: Callable[[StepShape, int], float],
    rates: Callable[[float], list[float]] | list[float],
    rows: int,
    *,
    host_ms: float,
    **options: Any,
) -> tuple[float, SimulatedEngine]:
    """Return which part of the best fixed K's tokens is lost.

    Where the rates are constant, the policy has learned them for as long a time before.
    """
    budgets = options.pop("budgets", False)
    knows_answers = options.pop("knows_answers", True)
    at = rates if callable(rates) else lambda _: rates
    random = np.random.default_rng(0)
    k = options.pop("k", K)
    machine = Machine(device, host_ms, at, rows, random=random, **options)
    engine = SimulatedEngine(machine, k, budgets=budgets)
    if not knows_answers:
        policy = engine.steps.policy
        policy.answer_tokens, policy.observe_answer = ENDLESS, lambda tokens: None
    until_ms = STEPS * device(StepShape(0), rows)
    if not callable(rates):
        engine.run(until_ms)
    rate = engine.run(until_ms)
    return 1 - rate / max(machine.fixed_rate(k, until_ms) for k in FIXED if k <= engine.k), engine


@pytest.mark.parametrize("budgets", [False, True])
@pytest.mark.parametrize(
    ("device", "rates", "rows", "host_ms"),
    [
        (device_ms(0.12, 0.002, 0.03), RISING, 1, 0.35),  # the host bounds steps up to K = 5
        (SHORT, RISING, 1, 0.1),
        (SHORT, [0.6] * K, 8, 0.2),
        (SHORT, [0.6] * K, 64, 0.5),
        (LONG, [0.6] * K, 1, 0.3),
        (LONG, [0.85] * K, 8, 0.3),
        (MANY, [0.6] * K, 64, 0.6),
    ],
)
def test_the_best_fixed_k_is_reached(
    device: Any, rates: list[float], rows: int, host_ms: float, budgets: bool
) -> None:
    lost, _ = regret(device, rates, rows, host_ms=host_ms, budgets=budgets)
    assert lost <= 0.02


@pytest.mark.parametrize(
    ("device", "rates", "rows", "host_ms"),
    [
        (device_ms(0.2, 0.002, 0.1), [0.3] * K, 1, 0.1),
        (device_ms(0.2, 0.004, 0.1), [0.3] * K, 64, 0.1),
        (LONG, [0.05] * K, 1, 0.3),
        (device_ms(9.0, 0.06, 0.5), [0.15] * K, 64, 0.6),
        (device_ms(9.0, 0.06, 0.5), [0.35] * K, 64, 0.6),
    ],
)
def test_plain_decoding_is_reached_where_it_is_best(
    device: Any, rates: list[float], rows: int, host_ms: float
) -> None:
    lost, _ = regret(device, rates, rows, host_ms=host_ms)
    assert lost <= 0.01


@pytest.mark.parametrize("knows_answers", [True, False])
@pytest.mark.parametrize(
    ("device", "rates", "rows", "answer_tokens", "admission", "bound"),
    [
        (SHORT, [0.8] * K, 1, 32, admission_ms(0.3, 0.15), 0.02),  # K = 3, and by steps alone 5
        (SHORT, RISING, 1, 24, admission_ms(0.5, 0.1), 0.02),
        (
            device_ms(0.3, 0.003, 0.03),
            [0.75] * K,
            16,
            64,
            admission_ms(0.25, 0.06),
            0.02,
        ),  # 2, and 3
        (
            device_ms(0.5, 0.002, 0.04),
            [0.6] * K,
            64,
            32,
            admission_ms(0.05, 0.03),
            0.01,
        ),  # 0, and 1
        (SHORT, [0.45] * K, 8, 8, admission_ms(0.2, 0.15), 0.01),
    ],
)
def test_admissions_enter_the_choice(
    device: Any,
    rates: list[float],
    rows: int,
    answer_tokens: int,
    admission: Callable[[int], float],
    bound: float,
    knows_answers: bool,
) -> None:
    """A policy that weighs steps alone, as if answers had no end, chooses too many drafts."""
    work = {"answer_tokens": answer_tokens, "admission_ms": admission}
    work["knows_answers"] = knows_answers
    lost, _ = regret(device, rates, rows, host_ms=0.1, **work)
    assert lost <= bound if knows_answers else lost > 0.03


STEP_MS = {0: 0.293, 1: 0.510, 2: 0.555, 3: 0.591, 5: 0.680}
ADMISSION_MS = {0: 0.52, 1: 0.66, 2: 0.68, 3: 0.70, 5: 0.75}
EMBEDDED = [0.81, 0.78, 0.825, 0.79, 0.83]  # AL 1.81, 2.96 and 3.71 with K = 1, 3 and 5


@pytest.mark.parametrize("fault", [None, "no wall times"])
def test_wall_times_correct_costs_that_are_wrong(
    fault: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An H100's costs with the embedded target. Of requests admitted together each took 0.48 ms of
    wall time, whatever K. By their costs alone plain decoding is best, and it is by far the worst.
    """
    if fault:
        monkeypatch.setattr(AdaptivePolicy, "observe_window", lambda self, window: None)
    work = {"answer_tokens": 45, "admission_ms": lambda k: 0.48}
    work["admission_as_measured"] = ADMISSION_MS.__getitem__
    lost, _ = regret(lambda s, _: STEP_MS[s.k], EMBEDDED, 64, host_ms=0.667, k=5, **work)
    assert lost > 0.1 if fault else lost <= 0.02


@pytest.mark.parametrize(
    ("device", "rows", "host_ms"), [(SHORT, 1, 0.1), (SHORT, 64, 0.1), (LONG, 1, 0.3)]
)
@pytest.mark.parametrize(("before", "after"), [(0.85, 0.5), (0.5, 0.85)])
def test_a_change_of_acceptance(
    before: float, after: float, device: Any, rows: int, host_ms: float
) -> None:
    middle = STEPS * device(StepShape(0), rows) / 2
    lost, _ = regret(device, lambda t: [before if t < middle else after] * K, rows, host_ms=host_ms)
    assert lost <= 0.02


def test_drafting_is_resumed_where_it_pays_again() -> None:
    """Drafts that are never accepted, and later most of them."""
    middle = STEPS * 5.0 / 2
    _, engine = regret(LONG, lambda t: [0.05 if t < middle else 0.8] * K, 1, host_ms=0.3)
    shapes = [shape.k for shape in engine.shapes]
    assert shapes.count(0) > 100
    assert min(shapes[-100:]) > 1


def test_steps_of_a_steady_shape_add_little_to_the_host() -> None:
    """No step between decisions looks at results, and decisions are rare."""
    _, engine = regret(SHORT, RISING, 1, host_ms=0.1)
    assert engine.decisions < len(engine.shapes) / 100
    steady = [shape for shape in engine.shapes if not shape.confidence and shape.budget is None]
    assert len(steady) > 0.99 * len(engine.shapes)
