"""A request's tokens and counters, as every engine keeps them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from draftlab.engine.counters import Counters
from draftlab.engine.sampling import Generation, Request
from draftlab.errors import UserError
from draftlab.kernels.compile_ahead import is_fake


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
        most_tokens: their number at which a limit ends the answer.
        counters, expected, steps, confidence: see `Generation`.
        started: time at which its prefill began; None before.
        finish: "stop" or "length" once it has ended.
    """

    def __init__(self, request: Request, k: int, max_length: int) -> None:
        self.request = request
        self.tokens = list(request.prompt_ids)
        self.most_tokens = min(len(self.tokens) + request.max_new_tokens, max_length)
        self.counters = Counters(k)
        self.expected = [0.0] * k
        self.steps: list[tuple[int, int]] = []
        self.confidence: list[tuple[float, ...]] = []
        self.started: float | None = None
        self.first_token_s = 0.0
        self.finish: str | None = None

    @property
    def elapsed(self) -> float:
        """Seconds since its prefill began."""
        return time.perf_counter() - (self.started or 0.0)

    def count_step(
        self,
        num_drafts: int,
        accepted: int,
        probability: list[float],
        confidence: list[float] | None = None,
    ) -> None:
        """Count a verify step, before tokens are truncated (methods §6).

        Args:
            probability: expected acceptance of each draft, given that it was reached.
            confidence: logits of the drafts' confidence; None where none is stated.
        """
        self.counters.add_step(num_drafts, accepted)
        self.steps.append((num_drafts, accepted))
        if confidence is not None:
            self.confidence.append(tuple(confidence[:num_drafts]))
        for i in range(min(accepted + 1, num_drafts)):
            self.expected[i] += probability[i]

    def append_tokens(self, tokens: list[int]) -> None:
        """Append tokens up to a stop token or a limit; count the truncated ones."""
        for i, token in enumerate(tokens):
            self.append_token(token)
            if self.finish:
                self.counters.truncated_tokens += len(tokens) - i - 1
                return

    def append_token(self, token: int) -> None:
        """Append a token."""
        self.tokens.append(token)
        if token in self.request.stop_ids:
            self.finish = "stop"
        elif len(self.tokens) >= self.most_tokens:
            self.finish = "length"

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
            tuple(self.confidence),
        )


class Sequence(GenerationState):
    """A request's state in the paged engine, its slot in the input batch and its cache blocks.

    Attributes:
        blocks: numbers of its blocks.
        room: positions that they hold; without a bound once they hold the longest sequence.
        limited: whether it samples with top-k or top-p.
        slot: its slot in the input batch; −1 while it waits.
        epoch: how often it has entered or left the batch; results of an earlier epoch are stale.
    """

    def __init__(self, request: Request, k: int, max_length: int) -> None:
        super().__init__(request, k, max_length)
        self.blocks: list[int] = []
        self.room: float = 0
        self.slot, self.epoch = -1, 0
        sampling = request.sampling
        self.limited = sampling.temperature > 0 and (
            sampling.top_k is not None or (sampling.top_p or 1.0) < 1
        )

    @property
    def resumed(self) -> bool:
        """True if it has emitted tokens; after a preemption its newest token is known."""
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
        confidence: list[float] | None = None,
    ) -> None:
        """Count and append the result of a verify step, or of a prefill (`num_drafts` = −1)."""
        if num_drafts == 0 and confidence is None:  # what follows does the same, in twice the time
            self.counters.undrafted_steps += 1
            self.steps.append((0, 0))
            self.append_token(tokens[0])
            return
        if num_drafts >= 0:
            self.count_step(num_drafts, accepted, probability, confidence)
        elif self.resumed:
            return  # the prefill after a preemption emits nothing new
        else:
            self.first_token_s = self.elapsed
        self.append_tokens(tokens[: accepted + 1])


@dataclass(frozen=True)
class InFlight:
    """A prefill or step whose results are being copied to the host.

    Attributes:
        sequences: the sequences of its rows, each with its epoch at launch.
        result: of `pack_results`.
        ready: event after the copy; None on a CPU.
    """

    sequences: tuple[tuple[Sequence, int], ...]
    result: Tensor
    ready: torch.cuda.Event | None

    def wait(self) -> None:
        """Wait for the copy."""
        if self.ready is not None:
            self.ready.synchronize()


def copy_to_host(sequences: list[Sequence], result: Tensor) -> InFlight:
    """Start the copy of a result to the host."""
    launched = tuple((sequence, sequence.epoch) for sequence in sequences)
    if not result.is_cuda or is_fake():
        return InFlight(launched, result, None)
    host = torch.empty(result.shape, dtype=result.dtype, pin_memory=True)
    host.copy_(result, non_blocking=True)
    ready = torch.cuda.Event()
    ready.record()
    return InFlight(launched, host, ready)
