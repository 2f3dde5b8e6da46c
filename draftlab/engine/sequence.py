"""A request that the paged engine decodes, as the host knows it."""

from __future__ import annotations

import time

from draftlab.engine.generation_state import GenerationState
from draftlab.engine.sampling import Request


class Sequence(GenerationState):
    """A request's state, its slot in the input batch and its cache blocks.

    Attributes:
        blocks: numbers of its blocks.
        slot: its slot in the input batch; −1 while it waits.
        epoch: how often it has entered or left the batch; results of an earlier epoch are stale.
    """

    def __init__(self, request: Request, k: int) -> None:
        super().__init__(request, k)
        self.blocks: list[int] = []
        self.slot, self.epoch = -1, 0

    @property
    def limited(self) -> bool:
        """Whether it samples with top-k or top-p."""
        sampling = self.request.sampling
        return sampling.temperature > 0 and (
            sampling.top_k is not None or (sampling.top_p or 1.0) < 1
        )

    @property
    def resumed(self) -> bool:
        """Whether it has emitted tokens; after a preemption its newest token is known."""
        return len(self.tokens) > len(self.request.prompt_ids)

    def enter(self, slot: int) -> None:
        """Enter the batch."""
        self.slot = slot
        self.epoch += 1
        if self.started is None:
            self.started = time.perf_counter()

    def leave(self) -> None:
        """Leave the batch."""
        self.slot = -1
        self.epoch += 1

    def add_result(
        self,
        tokens: list[int],
        accepted: int,
        num_drafts: int,
        probability: list[float],
        max_length: int,
    ) -> None:
        """Count and append the result of a verify step, or of a prefill (`num_drafts` = −1)."""
        if num_drafts >= 0:
            self.count_step(num_drafts, accepted, probability)
        elif self.resumed:
            return  # the prefill after a preemption emits nothing new
        else:
            self.first_token_s = self.elapsed
        self.append_tokens(tokens, max_length)
