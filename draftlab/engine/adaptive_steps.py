"""The engine's side of adaptive verification: measured costs, shapes of steps, results seen.

What a step does for it on the host is kept to a few attributes and appends. Results are looked at
when the next decision is due.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Collection
from itertools import chain, groupby
from statistics import median
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from draftlab.engine.adaptive import (
    AdaptiveVerification,
    CyclePolicy,
    Decision,
    Policy,
    shape_families,
)
from draftlab.engine.adaptive_costs import Prefill, RunStep, measure_costs, padded_size
from draftlab.engine.adaptive_policy import AdaptivePolicy
from draftlab.engine.admission_costs import AdmissionCosts
from draftlab.engine.generation_state import Sequence, check_prompts
from draftlab.engine.in_flight import InFlight
from draftlab.engine.sampling import Request
from draftlab.engine.step import Step, StepShape
from draftlab.engine.step_costs import ShapeFamily, StepCosts
from draftlab.engine.wall_times import START_STEPS, WallClock

MOST_ROWS = 4096
"""Rows of results that a decision reads at most."""
TIMED_STEPS = 15
"""Recent steps whose time on the host is known."""


class AdaptiveSteps:
    """Chooses the shape of an engine's steps.

    Args:
        step: the engine's step, with a drafter that states confidence and has fresh noise.
        settings: see there.
        run, prefill: see `measure_costs`.

    Attributes:
        shape: of the next step.
        any_behind: whether it drafts, and the draft KV cache lacks positions of some of its rows.

    Raises:
        ValueError: the drafter's settings do not allow adaptive verification.
    """

    def __init__(
        self, step: Step, settings: AdaptiveVerification, run: RunStep, prefill: Prefill
    ) -> None:
        drafter = step.drafter
        if not (drafter.confidence and drafter.fresh_noise):
            raise ValueError("adaptive verification needs drafts with confidence and fresh noise")
        for name in ("k", "confidence"):
            if name not in inspect.signature(drafter.propose).parameters:
                raise ValueError(
                    "adaptive verification chooses how many drafts are proposed, and whether they "
                    f"state confidence: {type(drafter)}.propose takes no `{name}`"
                )
        self.step, self.drafter, self.settings = step, drafter, settings
        self.run, self.prefill, self.batch = run, prefill, step.input_batch
        self.policy: Policy | None = None
        self.shape = StepShape(drafter.k, confidence=True)
        self._decision = Decision(ShapeFamily(drafter.k), 0)
        self._phases: deque[tuple[ShapeFamily, int]] = deque()  # families of coming steps
        self._family, self._steps_left = self._decision.family, 0
        self._rows, self._padded, self._size_changed = 0, 0, False  # rows, and those of the graph
        self.any_behind = False
        # Results that the policy has not seen.
        self._results: deque[tuple[list[int], list[int]]] = deque(maxlen=MOST_ROWS)
        self._confidence: deque[tuple[np.ndarray, ...]] = deque(maxlen=MOST_ROWS)
        self._stated = False  # whether the latest result's step stated confidence
        self._woke_s: float | None = None
        self._clock = WallClock()
        self._host_s: deque[float] = deque(maxlen=TIMED_STEPS)

    def measure(self, requests: Collection[Request]) -> None:
        """Measure the costs of all shapes before the first requests; later calls do nothing.

        Raises:
            UserError: a prompt is empty or leaves no room for an answer.
        """
        self._end_window()
        self._clock.read_s = None  # no requests ran since then
        if self.policy is not None or not requests:
            return
        check_prompts(requests, self.step.max_length)
        cycle = self.settings.cycle
        budgets = self.step.compacts or cycle
        families = shape_families(self.step.k, self.settings.shares, budgets=budgets)
        if cycle:  # costs play no part
            self.policy = CyclePolicy(families, self.step.k)
            return
        costs = measure_costs(
            self.step,
            families,
            list(requests),
            run=self.run,
            prefill=self.prefill,
            least_rows=self.settings.least_rows,
        )
        self.use_costs(*costs, sum(r.max_new_tokens for r in requests) / len(requests))

    def use_costs(self, costs: StepCosts, admissions: AdmissionCosts, answer_tokens: float) -> None:
        """Decide by these costs, measured or given.

        Args:
            answer_tokens: of an answer, as long as none has ended.
        """
        self.policy = AdaptivePolicy(self.step.k, costs, admissions, answer_tokens, self.settings)
        self.policy.late_steps = int(self.batch.device.type == "cuda")

    def first_drafts(self, requests: Collection[Request]) -> set[tuple[int, bool]]:
        """Return the numbers of first drafts that may be proposed, after `measure`, and whether
        they state confidence."""
        self.measure(requests)
        families = self.policy.families if self.policy else ()
        return {(family.k, family.states_confidence) for family in families}

    def shape_of(self, rows: int) -> StepShape:
        """Return the shape of the next step, if `rows` sequences are left for it."""
        if self.shape.budget is not None and rows != self._rows:
            return self._family.shape(padded_size(self.batch, rows))
        return self.shape

    def choose(self, running: list[Sequence]) -> list[Sequence]:
        """Choose `shape` for the next step; called once before each step.

        Returns:
            Sequences whose draft KV cache has to catch up before.
        """
        rows = len(running)
        if rows != self._rows:  # requests end in most steps of a large batch
            self._rows = rows
            if (padded := padded_size(self.batch, rows)) != self._padded:
                self._end_window()
                self._padded, self._size_changed = padded, True
        if self._steps_left > 0 and not self._size_changed and not self.any_behind:
            self._steps_left -= 1
            return []
        return self._choose(running, rows) if rows else []

    def _choose(self, running: list[Sequence], rows: int) -> list[Sequence]:
        padded = self._padded
        if not self._steps_left and not self._phases:
            started = perf_counter()
            self._decide(padded)
            self.policy.decision_ms = 1e3 * (perf_counter() - started)
        elif self._size_changed:
            self._change_family(self.policy.family(padded))
        self._size_changed = False
        if not self._steps_left:
            self._family, self._steps_left = self._phases.popleft()
            if not self._phases:
                self._clock.start(self._family, padded, self._steps_left)
        self._steps_left -= 1
        shape = self._family.shape(padded)
        if self.shape.k and not shape.k:
            for sequence in running:
                sequence.has_draft_cache = False
        self.shape = shape
        behind = [sequence for sequence in running if not sequence.has_draft_cache]
        self.any_behind = bool(behind) and shape.k > 0
        if not self.any_behind:
            return []
        if (most := self._decision.most_rows) is not None:
            behind.sort(key=lambda sequence: len(sequence.tokens))
            behind = behind[: max(most - (rows - len(behind)), 0)]
        return behind

    def _decide(self, rows: int) -> None:
        """Show the policy the results since the last time, and plan steps until the next."""
        policy = self.policy
        self._show_results()
        self._end_window()
        if self._host_s:
            policy.host_ms = 1e3 * median(self._host_s)
        scale = policy.scale
        self._decision = decision = policy.decide(rows)
        if policy.scale is not scale:
            self._write_calibration()
        family = decision.family
        if decision.with_confidence:
            family = ShapeFamily(family.k, confidence=True)
        self._plan(family, decision.steps)

    def _plan(self, family: ShapeFamily, steps: int) -> None:
        """Append steps of a family to the phases; wall time is taken of those of the last phase."""
        self._clock.stop()
        if family.share < 1 and not self.shape.confidence:
            # Drafts without confidence cannot be chosen from.
            self._phases.append((ShapeFamily(family.k, confidence=True), 1))
            steps -= 1
        if steps > START_STEPS:
            self._phases.append((family, START_STEPS))
            steps -= START_STEPS
        if steps:
            self._phases.append((family, steps))

    def _end_window(self) -> None:
        """Show the policy the wall time of the steps of now; another window follows the next ones.

        The first steps are in none, since they may capture graphs, and follow other steps.
        """
        window, decision = self._clock.stop(self._steps_left), self._decision
        if self.policy and window and decision.most_rows is None:
            self.policy.observe_window(window)
        if self._steps_left > START_STEPS and not self._phases:
            self._phases.append((self._family, self._steps_left - START_STEPS))
            self._steps_left = START_STEPS

    def _change_family(self, family: ShapeFamily) -> None:
        """Change the family of the steps until the next decision."""
        if (family.k, family.share) != (self._decision.family.k, self._decision.family.share):
            steps = self._steps_left + sum(steps for _, steps in self._phases)
            self._decision = Decision(family, steps)
            self._phases.clear()
            self._steps_left = 0
            self._plan(family, steps)

    def observe(self, launch: InFlight, results: list[list], confidence: Tensor) -> None:
        """Take in the results of a step with drafts.

        Args:
            results: tokens, accepted, num_drafts and probability of its rows; a graph's batch may
                be padded.
            confidence: float32 [B, k], or [B, 0] if none was stated.
        """
        _, accepted, num_drafts, _ = results
        stated, self._stated = self._stated, launch.shape.confidence
        if self._steps_left * len(accepted) > MOST_ROWS and not launch.shape.confidence:
            return  # enough rows will follow before the next decision
        num_drafts = num_drafts.copy()
        for row, (sequence, epoch) in enumerate(launch.sequences):
            if sequence.epoch != epoch or (launch.any_behind and not sequence.has_draft_cache):
                num_drafts[row] = 0  # its drafts tell nothing
        if launch.shape.budget is None:
            self._results.append((accepted, num_drafts))
        if launch.shape.confidence and stated:
            # A copy, since a result's pinned memory is used again.
            columns = np.array(accepted), np.array(num_drafts), confidence.numpy().copy()
            self._confidence.append(columns)

    def _show_results(self) -> None:
        """Show the policy the results of the steps since the last time, one K after the other."""
        if self._results:
            first = -(MOST_ROWS // max(len(self._results[-1][0]), 1) + 1)
            latest = list(self._results)[first:]
            accepted, num_drafts = (
                np.fromiter(chain.from_iterable(column), np.int64)
                for column in zip(*latest, strict=True)
            )
            self.policy.observe(accepted, num_drafts)
            self._results.clear()
        for _, group in groupby(self._confidence, lambda columns: columns[-1].shape[1]):
            columns = zip(*group, strict=True)
            self.policy.observe_confidence(*map(np.concatenate, columns))
        self._confidence.clear()

    def waited(self, from_s: float, to_s: float) -> None:
        """Take in when the host waited for a result; it worked from the last time until then."""
        if self._woke_s is not None:
            self._host_s.append(from_s - self._woke_s)
        self._woke_s = self._clock.read_s = to_s

    def finished(self, sequence: Sequence) -> None:
        """Take in the length of a finished answer."""
        self.policy.observe_answer(len(sequence.tokens) - len(sequence.request.prompt_ids))

    def admitted(self, requests: int) -> None:
        """Note that the host launches a prefill of requests, rather than a step."""
        self._woke_s = None
        self._clock.admitted(requests)

    def caught_up(self, took_ms: float) -> None:
        """Take in how long it took the rows of `choose` to catch up."""
        if self._decision.most_rows is not None:
            self.policy.catch_up_ms = took_ms
        self._woke_s = None
        self._clock.stop()

    def _write_calibration(self) -> None:
        """Copy the policy's calibration to the device."""
        for buffer, values in (
            (self.step.scale, self.policy.scale),
            (self.step.bias, self.policy.bias),
        ):
            buffer.copy_(self.batch.to_device(values.tolist(), torch.float32))
