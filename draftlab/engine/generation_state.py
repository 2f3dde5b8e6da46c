"""A request's tokens and counters, as every engine keeps them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from draftlab.engine.counters import Counters
from draftlab.engine.sampling import Generation, Request
from draftlab.errors import UserError


def check_prompts(requests: Iterable[Request], max_length: int) -> None:
    """Raise a `UserError` if a prompt is empty or leaves no room for an answer."""
    for request in requests:
        if not 0 < len(request.prompt_ids) < max_length:
            raise UserError(
                f"expected a prompt of 1 to {max_length - 1} tokens, found "
                f"{len(request.prompt_ids)}",
                where=f"prompt {request.id}",
                do="raise the length limit or shorten the prompt",
            )


class GenerationState:
    """A request, its tokens so far, and its counters.

    Attributes:
        tokens: prompt and answer; the last one has no cached key yet.
        counters, expected, steps: see `Generation`.
        started: time at which its prefill began; None before.
        finish: "stop" or "length" once it has ended.
    """

    def __init__(self, request: Request, k: int) -> None:
        self.request = request
        self.tokens = list(request.prompt_ids)
        self.counters = Counters(k)
        self.expected = [0.0] * k
        self.steps: list[tuple[int, int]] = []
        self.started: float | None = None
        self.first_token_s = 0.0
        self.finish: str | None = None

    @property
    def elapsed(self) -> float:
        """Seconds since its prefill began."""
        return time.perf_counter() - (self.started or 0.0)

    def count_step(self, num_drafts: int, accepted: int, probability: Sequence[float]) -> None:
        """Count a verify step, before tokens are truncated (methods §6).

        Args:
            probability: expected acceptance of each draft, given that it was reached.
        """
        self.counters.add_step(num_drafts, accepted)
        self.steps.append((num_drafts, accepted))
        for i in range(min(accepted + 1, num_drafts)):
            self.expected[i] += probability[i]

    def append_tokens(self, tokens: Sequence[int], max_length: int) -> None:
        """Append tokens up to a stop token or a limit; count the truncated ones."""
        for i, token in enumerate(tokens):
            self.tokens.append(token)
            num_generated = len(self.tokens) - len(self.request.prompt_ids)
            if token in self.request.stop_ids:
                self.finish = "stop"
            elif num_generated >= self.request.max_new_tokens or len(self.tokens) >= max_length:
                self.finish = "length"
            if self.finish:
                self.counters.truncated_tokens += len(tokens) - i - 1
                return

    def result(self) -> Generation:
        """Return the finished request's generation."""
        return Generation(
            self.request.id,
            tuple(self.tokens[len(self.request.prompt_ids) :]),
            self.finish or "length",
            self.counters,
            tuple(self.expected),
            tuple(self.steps),
            self.first_token_s,
            self.elapsed,
        )
