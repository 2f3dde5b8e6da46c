"""The engine's side of adaptive verification: measured costs, shapes of steps, results seen."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Collection, Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from draftlab.engine.adaptive import AdaptivePolicy, AdaptiveVerification, shape_families
from draftlab.engine.feature_backlog import FeatureBacklog
from draftlab.engine.sampling import Request
from draftlab.engine.step import GraphedStep, Step, StepShape
from draftlab.engine.step_costs import StepCosts, measure_step_costs

RunStep = Callable[[tuple[int, ...], StepShape], Tensor]


class AdaptiveSteps:
    """Chooses the shape of an engine's steps.

    Args:
        step: the engine's step, with a drafter that states confidence and has fresh noise.
        settings: see there.
        run: launches a step.
        num_blocks: blocks of the KV cache beside block 0.

    Raises:
        ValueError: the drafter's settings do not allow adaptive verification.
    """

    def __init__(
        self, step: Step, settings: AdaptiveVerification, run: RunStep, num_blocks: int
    ) -> None:
        drafter = step.drafter
        if not (drafter.confidence and drafter.fresh_noise):
            raise ValueError("adaptive verification needs drafts with confidence and fresh noise")
        if "k" not in inspect.signature(drafter.propose).parameters:
            raise ValueError(
                f"adaptive verification chooses how many drafts are proposed: {type(drafter)}."
                "propose takes no `k`"
            )
        self.step, self.drafter, self.settings = step, drafter, settings
        self.run, self.num_blocks = run, num_blocks
        self.batch = step.input_batch
        width = len(drafter.boundaries) * step.target.hidden_size
        step.backlog = FeatureBacklog(self.batch, width, drafter.dtype)
        self.policy: AdaptivePolicy | None = None
        self._shape = StepShape(drafter.k)
        self._steps_behind = 0  # steps without the head since its cache was extended
        # The latest results that the policy has not seen, and their number of rows.
        self._results: deque[tuple[np.ndarray, ...]] = deque()
        self._num_rows = 0

    def measure(self, requests: Collection[Request]) -> None:
        """Measure the costs of all shapes before the first requests; later calls do nothing."""
        if self.policy is not None or not requests:
            return
        cycle = self.settings.cycle
        budgets = self.step.compacts or cycle
        families = shape_families(self.step.k, self.settings.shares, budgets=budgets)
        if cycle:  # costs play no part
            self.use_costs(StepCosts({family: {} for family in families}))
            return
        if self.step.cache.states is not None:
            self._allocate_recurrent_states()
        lengths = [len(r.prompt_ids) + r.max_new_tokens // 2 for r in requests]
        length = min(sum(lengths) // len(lengths), self.step.max_length - self.step.k - 2)
        all_sizes = self._sizes()
        large = [size for size in all_sizes if size >= self.settings.least_rows]
        costs = measure_step_costs(
            self.run,
            self.batch,
            {family: all_sizes if family.share == 1 else large for family in families},
            tokens=list(dict.fromkeys(token for r in requests for token in r.prompt_ids)),
            length=max(length, 1),
            num_blocks=self.num_blocks,
        )
        self.step.backlog.count.zero_()
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
        self._write_calibration()

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

    @property
    def num_drafts(self) -> int:
        """First drafts of new requests: as many as the latest step proposed."""
        return self._shape.k

    @property
    def numbers_of_drafts(self) -> list[int]:
        """Numbers of drafts that steps may propose; all drafts until costs are measured."""
        if self.policy is None:
            return [self.drafter.k]
        return sorted({family.k for family in self.policy.families})

    def next_shape(self, slots: Sequence[int]) -> StepShape:
        """Return the shape of the next step of these slots; called once before each step."""
        rows = self._padded_size(len(slots))
        if self.policy.due:
            self._show_results()
        family, calibrated = self.policy.choose(rows)
        if calibrated:
            self._write_calibration()
        self._shape = family.shape(rows)
        backlog = self.step.backlog
        if self._steps_behind and (self._shape.k or self._steps_behind == backlog.capacity):
            backlog.flush(self.drafter, self.batch.index(list(slots)))
            self._steps_behind = 0
        self._steps_behind += self._shape.k == 0
        return self._shape

    def observe(self, results: tuple[Tensor, ...], current: list[bool]) -> None:
        """Take in a step's results (`unpack_results`).

        Args:
            current: which of the first rows still run; a graph's batch may be padded.
        """
        _, accepted, num_drafts, _, confidence = results
        if not confidence.shape[1]:  # a prefill or a step without drafts tells nothing
            return
        verified = num_drafts[: len(current)].numpy() > 0
        rows = np.flatnonzero(verified & np.array(current))
        # Copies, since a result's pinned memory is used again.
        columns = (column.numpy()[rows] for column in (accepted, num_drafts, confidence))
        self._results.append(tuple(columns))
        self._num_rows += len(rows)
        while self._num_rows - len(self._results[0][0]) >= self.settings.window:
            self._num_rows -= len(self._results.popleft()[0])

    def _show_results(self) -> None:
        """Show the policy the results of the steps since the last time, one K after the other."""
        for _, group in groupby(self._results, lambda columns: columns[-1].shape[1]):
            self.policy.observe(*map(np.concatenate, zip(*group, strict=True)))
        self._results.clear()
        self._num_rows = 0

    def _write_calibration(self) -> None:
        """Copy the policy's calibration to the device."""
        for buffer, values in (
            (self.step.scale, self.policy.scale),
            (self.step.bias, self.policy.bias),
        ):
            buffer.copy_(self.batch.to_device(values.tolist(), torch.float32))
