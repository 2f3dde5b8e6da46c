"""Steps of an engine with known costs and acceptance, in which real decisions are made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import comb
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from draftlab.engine.adaptive import AdaptiveVerification, shape_families
from draftlab.engine.adaptive_steps import AdaptiveSteps
from draftlab.engine.admission_costs import AdmissionCosts
from draftlab.engine.in_flight import InFlight
from draftlab.engine.step import StepShape
from draftlab.engine.step_costs import StepCosts

ENDLESS = 10**9
"""Tokens of an answer that does not end."""


@dataclass
class Machine:
    """A machine whose steps take known times, and whose drafts are accepted at known rates.

    Attributes:
        device_ms: of a step, from its shape and its number of rows.
        host_ms: of a step; the next one begins after the longer one of both.
        rates: from the time in ms to the rates at which drafts are accepted if those before were.
        rows: that always run.
        decision_ms, catch_up_ms: that a decision takes on the host, and catching up of one row.
        measured: factor of each measured cost, between 1 − noise and 1 + noise.
        noise: of costs as they are measured, and of each step.
        own_ms: what adaptive steps add to the host's time of every step.
        answer_tokens: of every answer, after which another request takes its row.
        admission_ms: of a request on the device, from the number of its first drafts.
        admission_as_measured: what is measured of it before; None: the same.
    """

    device_ms: Callable[[StepShape, int], float]
    host_ms: float
    rates: Callable[[float], list[float]]
    rows: int
    decision_ms: float = 0.4
    catch_up_ms: float = 5.0
    noise: float = 0.01
    own_ms: float = 0.002
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    answer_tokens: int = ENDLESS
    admission_ms: Callable[[int], float] = lambda k: 0.0
    admission_as_measured: Callable[[int], float] | None = None

    def step_ms(self, shape: StepShape, extra_host_ms: float = 0.0) -> float:
        """Return the time of a step."""
        device = self.device_ms(shape, self.rows) * (1 + self.noise * self.random.normal())
        return max(device, self.host_ms + extra_host_ms)

    def accepted(self, k: int, time_ms: float) -> np.ndarray:
        """Return the accepted drafts of each row, int64 [rows]."""
        hits = self.random.random((self.rows, k)) < np.array(self.rates(time_ms))[:k]
        return hits.cumprod(1).sum(1)

    def fixed_rate(self, k: int, until_ms: float) -> float:
        """Return the expected tokens a millisecond of a fixed K up to a time."""
        step = max(self.device_ms(StepShape(k), self.rows), self.host_ms)
        if self.answer_tokens == ENDLESS:
            times = np.linspace(0, until_ms, 200, endpoint=False)
            tokens = [self.rows * (1 + np.cumprod(self.rates(t)[:k]).sum()) for t in times]
            return float(np.mean(tokens)) / step
        steps = self._expected_steps(k) + 1  # the host reads the end one step later
        for count in range(1, self.rows + 1):  # that end in the same step
            chance = comb(self.rows, count) * steps**-count * (1 - 1 / steps) ** (self.rows - count)
            step += chance * self.admissions_ms(k, count)
        return self.rows * self.answer_tokens / (steps * step)

    def admissions_ms(self, k: int, count: int) -> float:
        """Return what admissions add to the time between two steps; they take the host no time."""
        step = self.device_ms(StepShape(k), self.rows)
        longer = max(count * self.admission_ms(k), self.host_ms)  # the host launches a step
        return longer + step - max(step, self.host_ms)

    def _expected_steps(self, k: int) -> float:
        """Return the expected steps of an answer; its first token comes from the prefill."""
        survival = np.array([1.0, *np.cumprod(self.rates(0.0)[:k]), 0.0])
        emits = survival[:-1] - survival[1:]  # the probability of 1, 2, … k + 1 tokens
        steps = [0.0]
        for left in range(1, self.answer_tokens):
            rest = [steps[max(left - 1 - i, 0)] for i in range(k + 1)]
            steps.append(1 + float(np.dot(emits, rest)))
        return steps[-1]


class SimulatedEngine:
    """The loop of `Engine`, with a machine's times and drafts in the place of a target's.

    Args:
        k: most drafts.
    """

    def __init__(self, machine: Machine, k: int, *, budgets: bool = False, **settings: Any) -> None:
        self.machine, self.k, rows = machine, k, machine.rows
        drafter = SimpleNamespace(
            confidence=True,
            fresh_noise=True,
            propose=lambda verified, k, confidence: None,
            k=k,
        )
        batch = SimpleNamespace(device=torch.device("cpu"), num_slots=rows)
        step = SimpleNamespace(drafter=drafter, input_batch=batch, k=k, compacts=budgets)
        adaptive = AdaptiveVerification(**settings)
        self.steps = AdaptiveSteps(step, adaptive, run=None, prefill=None)
        self.steps._write_calibration = lambda: None
        families = shape_families(k, adaptive.shares, budgets=budgets)
        noise = 1 + machine.noise * machine.random.uniform(-1, 1, len(families))
        measured = {
            family: {rows: machine.device_ms(family.shape(rows), rows) * factor}
            for family, factor in zip(families, noise, strict=True)
        }
        admission_ms = machine.admission_as_measured or machine.admission_ms
        admissions = {
            k: {1: admission_ms(k) * (1 + machine.noise * machine.random.uniform(-1, 1))}
            for k in {family.k for family in families}
        }
        no_time = {k: {1: 0.0} for k in admissions}
        self.steps.use_costs(
            StepCosts(measured), AdmissionCosts(admissions, no_time), 2.0 * machine.answer_tokens
        )
        self.steps.policy.late_steps = 1
        self.decisions, decide = 0, self.steps.policy.decide

        def counted(rows: int) -> Any:
            self.decisions += 1
            return decide(rows)

        self.steps.policy.decide = counted
        self.shapes: list[StepShape] = []
        self.catch_ups = 0

    def run(self, until_ms: float) -> float:
        """Return the expected tokens a millisecond up to a time.

        What a step emits beyond what was expected of it is not counted. This changes no expected
        value, and leaves little noise.
        """
        machine, steps = self.machine, self.steps
        sequences = [self._admitted() for _ in range(machine.rows)]
        left = machine.random.integers(1, machine.answer_tokens, machine.rows)
        time_ms, tokens, in_flight, ended = 0.0, 0.0, None, []
        while time_ms < until_ms:
            decisions = self.decisions
            behind = steps.choose(sequences)
            steps.policy.decision_ms = machine.decision_ms  # not this machine's
            if behind:
                took = machine.catch_up_ms * len(behind)
                time_ms, self.catch_ups = time_ms + took, self.catch_ups + 1
                steps.caught_up(took)
                for sequence in behind:
                    sequence.has_draft_cache = True
            shape, extra = steps.shape_of(machine.rows), machine.own_ms
            extra += machine.decision_ms * (self.decisions - decisions)
            self.shapes.append(shape)
            accepted = machine.accepted(shape.k, time_ms)
            verified = np.full(machine.rows, shape.k)
            if shape.budget is not None:  # drafts of equal survival: the first ones of each row
                each, more = divmod(shape.budget, machine.rows)
                verified = each + (np.arange(machine.rows) < more)
            has_cache = np.array([sequence.has_draft_cache for sequence in sequences])
            accepted = np.minimum(accepted, verified) * has_cache
            took = machine.step_ms(shape, extra)
            expected = np.cumsum([0.0, *np.cumprod(machine.rates(time_ms))])[verified] * has_cache
            luck = np.where(left > 0, accepted - expected, 0.0)
            emitted = np.minimum(accepted + 1, left)
            time_ms, tokens = time_ms + took, tokens + (emitted - luck).sum()
            if in_flight is not None and in_flight[0].shape.k:
                steps.observe(*in_flight)  # the host is a step behind
            worked_until = time_ms - took + machine.host_ms + extra
            steps.waited(worked_until / 1e3, time_ms / 1e3)
            launched = tuple((sequence, 0) for sequence in sequences)
            launch = InFlight(launched, None, None, shape, steps.any_behind)
            confidence = torch.zeros(machine.rows, shape.k)  # tells nothing
            in_flight = launch, [[], accepted.tolist(), verified.tolist(), []], confidence
            for row in ended:  # as the host read while this step ran
                sequences[row].epoch += 1
                sequences[row] = self._admitted()
                left[row], tokens = machine.answer_tokens - 1, tokens + 1
                steps.policy.observe_answer(machine.answer_tokens)
            if ended:
                steps.admitted(len(ended))
                time_ms += machine.admissions_ms(shape.k, len(ended))
            left -= emitted
            ended = np.flatnonzero(left == 0).tolist()
        return tokens / time_ms

    def _admitted(self) -> SimpleNamespace:
        return SimpleNamespace(epoch=0, has_draft_cache=self.steps.shape.k > 0, tokens=[0])
