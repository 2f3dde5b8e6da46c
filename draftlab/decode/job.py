"""A request in work, as the host knows it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from draftlab.decode.sampling import Generation, Request
from draftlab.results import Counters


class Job:
    """A request, its tokens so far, what it holds, and its counters.

    Attributes:
        tokens: prompt and answer.
        blocks: numbers of the blocks it owns.
        slot: its place on the device; −1 when it waits.
        residence: how many times it has joined or left: results launched in another one are stale.
        finish: "stop" or "length" once it has ended.
    """

    def __init__(self, request: Request, k: int) -> None:
        self.request = request
        self.tokens = list(request.prompt_ids)
        self.blocks: list[int] = []
        self.slot, self.residence = -1, 0
        self.finish: str | None = None
        self.counters = Counters(k)
        self.expected = [0.0] * k
        self.steps: list[tuple[int, int]] = []
        self.started: float | None = None
        self.first_token_s = 0.0

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
        """Books a result: a verify step's, or a prefill's (`num_drafts` = −1), which counts none.

        `accepted` is counted before a stop token or a limit cuts tokens off (METHODS §6).
        """
        if num_drafts >= 0:
            self.counters.add_step(num_drafts, accepted)
            self.steps.append((num_drafts, accepted))
            for i in range(min(accepted + 1, num_drafts)):
                self.expected[i] += chance[i]
        elif self.resumed:
            return  # a prefill that computed again what had been emitted
        else:
            self.first_token_s = time.perf_counter() - (self.started or 0.0)
        for i, token in enumerate(tokens):
            self.tokens.append(token)
            produced = len(self.tokens) - len(self.request.prompt_ids)
            if token in self.request.stop_ids:
                self.finish = "stop"
            elif produced >= self.request.max_new_tokens or len(self.tokens) >= max_length:
                self.finish = "length"
            if self.finish:
                self.counters.truncated_tokens += len(tokens) - i - 1
                return

    def result(self) -> Generation:
        """The finished request."""
        return Generation(
            self.request.id,
            tuple(self.tokens[len(self.request.prompt_ids) :]),
            self.finish or "length",
            self.counters,
            tuple(self.expected),
            tuple(self.steps),
            self.first_token_s,
            time.perf_counter() - (self.started or 0.0),
        )
