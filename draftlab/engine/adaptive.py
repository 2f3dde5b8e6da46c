"""Adaptive verification: how many drafts a step proposes and verifies, from survival and costs.

A fixed K drafts too much on a busy GPU and too little on an idle one. Here each step has a shape
(`StepShape`) that promises the most tokens a second:

    steps      = (tokens of an answer after its first) / (1 + drafts of a row that survive)
    tokens / s = rows · tokens of an answer / (steps · (a step's time + its share of admissions))

Times are those on the device or on the host, whichever are longer. An admission is a request's
prefill and first drafts, with the K in force; where steps and answers are short, it counts.
`AdaptivePolicy.token_ms` also has the tokens and steps behind an answer's end. The wall time that
steps take on a GPU corrects the modelled one (`wall_times.py`).

How many survive is known from results that the host has read, a step or more ago. So the shape
depends on nothing that the drafts of the step itself decide, and within a budget drafts are chosen
by what comes before them (`kernels/draft_allocation.py`): the output keeps the target's
distribution. Their drafts need noise of their own for every step, since a choice looks at
confidences that depend on drafts behind a rejected one.

Decisions are rare, so that they take a small share of the time. Between two of them a step has the
kernels of a step of that fixed K, and without drafts those of plain decoding. What the steps of the
present shape do not show is found out by trials, whose cost is bounded by a share of the time, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from draftlab.engine.step_costs import ShapeFamily
from draftlab.engine.wall_times import Window

Array = np.ndarray


@dataclass(frozen=True)
class AdaptiveVerification:
    """Settings of adaptive verification.

    Attributes:
        shares: shares of a batch's drafts that a step may verify, beside all of them.
        memory: rows of steps that rates of acceptance are estimated from, older ones less.
        window: recent rows of steps that confidence is calibrated on.
        margin: a number of drafts is left for another one only if that promises so much more.
        resume: drafting is resumed only if it promises so much more than plain decoding.
        least_rows: rows from which on shares of the drafts are considered; with fewer rows a step
            reads weights for longer than it multiplies, whatever it verifies.
        decision_share: share of the time that the host may spend on decisions.
        trial_share: share of the time that may be lost by trials.
        cycle: take every shape in turn, whatever it costs, as tests of losslessness need it. Each
            has two steps: the first one proposes the drafts that the second one can verify.
    """

    shares: tuple[float, ...] = (0.75, 0.5)
    memory: int = 4096
    window: int = 512
    margin: float = 0.003
    resume: float = 0.01
    least_rows: int = 8
    decision_share: float = 0.004
    trial_share: float = 0.005
    cycle: bool = False


@dataclass(frozen=True)
class Decision:
    """The shapes of the steps until the next decision.

    Attributes:
        family: of the steps.
        steps: how many follow.
        with_confidence: whether they state their drafts' confidence, although they verify all.
        most_rows: rows that need drafts which are worth something; None: all.
    """

    family: ShapeFamily
    steps: int
    with_confidence: bool = False
    most_rows: int | None = None


class Policy(Protocol):
    """The interface of a policy, which decides the shapes of steps for `AdaptiveSteps`.

    Attributes:
        families: the families to choose from.
        scale, bias: float64 [K], calibration of the drafts' confidence.
        host_ms, decision_ms, catch_up_ms: milliseconds that the host takes for a step, for a
            decision, and that catching up a few rows takes; written by `AdaptiveSteps`.
        late_steps: steps of a row after its request's end, before the host has read it.
    """

    families: Sequence[ShapeFamily]
    scale: Array
    bias: Array
    host_ms: float
    decision_ms: float
    catch_up_ms: float
    late_steps: int

    def observe(self, accepted: Array, num_drafts: Array) -> None:
        """Take in rows int [N] of steps that verified all their drafts."""

    def observe_confidence(self, accepted: Array, num_drafts: Array, confidence: Array) -> None:
        """Take in rows [N] of steps, with the confidence float [N, k] of their drafts."""

    def observe_answer(self, tokens: int) -> None:
        """Take in the number of tokens of an answer that has ended."""

    def observe_window(self, window: Window) -> None:
        """Take in the wall time of steps of one family."""

    def decide(self, rows: int) -> Decision:
        """Decide the next steps of `rows` rows."""

    def family(self, rows: int) -> ShapeFamily:
        """Return the family where the number of rows has changed between decisions."""


def shape_families(k: int, shares: Sequence[float], *, budgets: bool) -> list[ShapeFamily]:
    """Return the shapes to choose from: no drafts, some K's up to `k`, and shares of their drafts.

    Args:
        budgets: whether verifying a share of the drafts costs less than all of them. If so, steps
            of all drafts that state confidence are families, too.
    """
    ks = sorted({0, 1, 2, 3, 5, k} - set(range(k + 1, 6)))
    families = [ShapeFamily(each) for each in ks]
    if budgets:
        families += [ShapeFamily(each, share) for each in ks if each > 1 for share in shares]
        families += [ShapeFamily(each, confidence=True) for each in ks if each > 1]
    return families


class CyclePolicy:
    """Takes every family in turn, for two steps each."""

    steps_each = 2

    def __init__(self, families: Sequence[ShapeFamily], k: int) -> None:
        self.families, self.scale, self.bias = families, np.ones(k), np.zeros(k)
        self.host_ms, self.decision_ms, self.catch_up_ms = 0.0, 0.0, 0.0
        self.late_steps = 0
        self._next, self._family = 0, families[0]

    def observe(self, *_: Array) -> None:
        """Ignore results."""

    observe_confidence = observe_answer = observe_window = observe

    def decide(self, rows: int) -> Decision:
        """Return the next family."""
        self._family = self.families[self._next]
        self._next = (self._next + 1) % len(self.families)
        return Decision(self._family, self.steps_each)

    def family(self, rows: int) -> ShapeFamily:
        """Return the present family."""
        return self._family
