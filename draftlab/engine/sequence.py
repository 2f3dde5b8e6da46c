"""A request in work, as the host knows it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from draftlab.engine.generation_state import Progress
from draftlab.engine.sampling import Request


class Job(Progress):
    """A request's progress, and what it holds on the device.

    Attributes:
        blocks: numbers of the blocks it owns.
        slot: its place on the device; −1 when it waits.
        residence: how many times it has joined or left: results launched in another one are stale.
    """

    def __init__(self, request: Request, k: int) -> None:
        super().__init__(request, k)
        self.blocks: list[int] = []
        self.slot, self.residence = -1, 0

    @property
    def limited(self) -> bool:
        """Whether it samples with top-k or top-p."""
        sampling = self.request.sampling
        return sampling.temperature > 0 and (
            sampling.top_k is not None or (sampling.top_p or 1.0) < 1
        )

    @property
    def resumed(self) -> bool:
        """Whether it has emitted tokens already: after an eviction, its newest token is known."""
        return len(self.tokens) > len(self.request.prompt_ids)

    def join(self, slot: int) -> None:
        """Takes a slot."""
        self.slot = slot
        self.residence += 1
        if self.started is None:
            self.started = time.perf_counter()

    def leave(self) -> None:
        """Gives its slot back."""
        self.slot = -1
        self.residence += 1

    def take(
        self,
        tokens: Sequence[int],
        accepted: int,
        num_drafts: int,
        chance: Sequence[float],
        max_length: int,
    ) -> None:
        """Books a result: a verify step's, or a prefill's (`num_drafts` = −1; counts none)."""
        if num_drafts >= 0:
            self.count(num_drafts, accepted, chance)
        elif self.resumed:
            return  # a prefill that computed again what had been emitted
        else:
            self.first_token_s = self.elapsed
        self.emit(tokens, max_length)
