"""The engine's side of adaptive verification: measured costs, shapes of steps, results seen.

What a step does for it on the host is kept to a few attributes and appends. Results are looked at
when the next decision is due.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Collection
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
from draftlab.engine.adaptive_policy import AdaptivePolicy
from draftlab.engine.generation_state import Sequence
from draftlab.engine.in_flight import InFlight
from draftlab.engine.sampling import Request
from draftlab.engine.step import GraphedStep, Step, StepShape
from draftlab.engine.step_costs import STEPS, ShapeFamily, StepCosts, measure_step_costs

RunStep = Callable[[tuple[int, ...], StepShape], object]
MOST_ROWS = 4096
"""Rows of results that a decision reads at most."""
TIMED_STEPS = 15
"""Recent steps whose time on the host is known."""


class AdaptiveSteps:
    """Chooses the shape of an engine's steps.

    Args:
        step: the engine's step, with a drafter that states confidence and has fresh noise.
        settings: see there.
        run: launches a step, and the copy of its results to the host.
        num_blocks: blocks of the KV cache beside block 0.

    Attributes:
        shape: of the next step.
        any_behind: whether it drafts, and the draft KV cache lacks positions of some of its rows.

    Raises:
        ValueError: the drafter's settings do not allow adaptive verification.
    """

    def __init__(
        self, step: Step, settings: AdaptiveVerification, run: RunStep, num_blocks: int
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
        self.run, self.num_blocks = run, num_blocks
        self.batch = step.input_batch
        self.policy: Policy | None = None
        self.shape = StepShape(drafter.k, confidence=True)
        self._decision = Decision(ShapeFamily(drafter.k), 0)
        self._phases: deque[tuple[ShapeFamily, int]] = deque()  # families of coming steps
        self._family, self._steps_left, self._rows = self._decision.family, 0, 0
        self.any_behind = False
        # Results that the policy has not seen.
        self._results: deque[tuple[list[int], list[int]]] = deque(maxlen=MOST_ROWS)
        self._confidence: deque[tuple[np.ndarray, ...]] = deque(maxlen=MOST_ROWS)
        self._stated = False  # whether the latest result's step stated confidence
        self._woke_s: float | None = None
        self._host_s: deque[float] = deque(maxlen=TIMED_STEPS)

    def measure(self, requests: Collection[Request]) -> None:
        """Measure the costs of all shapes before the first requests; later calls do nothing."""
        if self.policy is not None or not requests:
            return
        cycle = self.settings.cycle
        budgets = self.step.compacts or cycle
        families = shape_families(self.step.k, self.settings.shares, budgets=budgets)
        if cycle:  # costs play no part
            self.policy = CyclePolicy(families, self.step.k)
            return
        if self.step.cache.states is not None:
            self._allocate_recurrent_states()
        lengths = [len(r.prompt_ids) + r.max_new_tokens // 2 for r in requests]
        room = self.step.max_length - (STEPS + 2) * (self.step.k + 1)
        length = min(sum(lengths) // len(lengths), room)
        all_sizes = self._sizes()
        large = [size for size in all_sizes if size >= self.settings.least_rows]
        costs = measure_step_costs(
            self.run,
            self.batch,
            {f: large if f.states_confidence else all_sizes for f in families},
            tokens=list(dict.fromkeys(token for r in requests for token in r.prompt_ids)),
            length=max(length, 1),
            num_blocks=self.num_blocks,
        )
        self.use_costs(costs)

    def _allocate_recurrent_states(self) -> None:
        """Run a made-up prompt of one token: steps need the states that prompts allocate."""
        step, index = self.step, self.batch.index([0])
        token = torch.zeros_like(index)[:, None]
        cache = step.cache.at(self.batch.block_table[index], token, token - 1, index, [1])
        step.decoder.states(token, step.boundaries, positions=token, cache=cache)

    def use_costs(self, costs: StepCosts) -> None:
        """Decide by these costs, measured or given."""
        self.policy = AdaptivePolicy(self.step.k, costs, self.settings)

    def _sizes(self) -> list[int]:
        """Return the numbers of rows to measure: one, the whole batch, and quarters of it."""
        slots = self.batch.num_slots
        sizes = {1, slots, max(slots // 4, 1), max(slots // 2, 1)}
        return sorted({self._padded_size(size) for size in sizes})

    def _padded_size(self, rows: int) -> int:
        """Return the rows of a step with the dummies that pad its graph, up to the whole batch."""
        if self.batch.device.type != "cuda":
            return rows
        return min(GraphedStep.padded_size(rows), self.batch.num_slots)

    def numbers_of_drafts(self, requests: Collection[Request]) -> list[int]:
        """Return the numbers of drafts that steps may propose, after `measure`."""
        self.measure(requests)
        return sorted({family.k for family in self.policy.families}) if self.policy else []

    def shape_of(self, rows: int) -> StepShape:
        """Return the shape of the next step, if `rows` sequences are left for it."""
        if rows != self._rows and self.shape.budget is not None:
            return self._family.shape(self._padded_size(rows))
        return self.shape

    def choose(self, running: list[Sequence]) -> list[Sequence]:
        """Choose `shape` for the next step; called once before each step.

        Returns:
            Sequences whose draft KV cache has to catch up before.
        """
        rows = len(running)
        if self._steps_left > 0 and rows == self._rows and not self.any_behind:
            self._steps_left -= 1
            return []
        return self._choose(running, rows) if rows else []

    def _choose(self, running: list[Sequence], rows: int) -> list[Sequence]:
        padded = self._padded_size(rows)
        if not self._steps_left and not self._phases:
            started = perf_counter()
            self._decide(padded)
            self.policy.decision_ms = 1e3 * (perf_counter() - started)
        elif rows != self._rows:
            self._change_family(self.policy.family(padded))
        self._rows = rows
        if not self._steps_left:
            self._family, self._steps_left = self._phases.popleft()
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
        """Append steps of a family to the phases."""
        if family.share < 1 and not self.shape.confidence:
            # Drafts without confidence cannot be chosen from.
            self._phases.append((ShapeFamily(family.k, confidence=True), 1))
            steps -= 1
        if steps:
            self._phases.append((family, steps))

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
        num_drafts = num_drafts.copy()
        for row, (sequence, epoch) in enumerate(launch.sequences):
            if sequence.epoch != epoch or (launch.any_behind and not sequence.has_draft_cache):
                num_drafts[row] = 0  # its drafts tell nothing
        if launch.shape.budget is None:
            self._results.append((accepted, num_drafts))
        if launch.shape.confidence and self._stated:
            # A copy, since a result's pinned memory is used again.
            columns = np.array(accepted), np.array(num_drafts), confidence.numpy().copy()
            self._confidence.append(columns)
        self._stated = launch.shape.confidence

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
        self._woke_s = to_s

    def interrupt(self) -> None:
        """Note that the host does something other than steps: a prefill."""
        self._woke_s = None

    def caught_up(self, took_ms: float) -> None:
        """Take in how long it took the rows of `choose` to catch up."""
        if self._decision.most_rows is not None:
            self.policy.catch_up_ms = took_ms
        self.interrupt()

    def _write_calibration(self) -> None:
        """Copy the policy's calibration to the device."""
        for buffer, values in (
            (self.step.scale, self.policy.scale),
            (self.step.bias, self.policy.bias),
        ):
            buffer.copy_(self.batch.to_device(values.tolist(), torch.float32))
