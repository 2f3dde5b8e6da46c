"""Requests, their sampling parameters, and their generations."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from draftlab.engine.counters import Counters
from draftlab.kernels.noise import prompt_key
from draftlab.kernels.sampling.types import SamplingMetadata


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters; temperature 0 is greedy, None turns a limit off."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0 or (self.top_k or 1) < 1 or not 0 < (self.top_p or 1.0) <= 1:
            raise ValueError(f"expected temperature >= 0, top_k >= 1, 0 < top_p <= 1; found {self}")


@dataclass(frozen=True)
class Request:
    """A prompt to continue. Its noise is keyed by `id`: equal ids and seeds sample equally."""

    id: str
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = Sampling()
    stop_ids: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Generation:
    """A finished request.

    Attributes:
        token_ids: generated tokens, including a final stop token.
        finish: "stop" or "length"; "no_room" without tokens: a server has no room for the prompt.
        counters: counters of its verify steps.
        expected: per draft position, the summed probability of acceptance where it was reached.
        steps: (drafted, accepted) of each verify step, in order.
        first_token_s, total_s: seconds from the start of its prefill.
        confidence: the logits of the verified drafts' confidence, for each step; empty unless the
            drafter states them (`Drafter.confidence`).
    """

    id: str
    token_ids: tuple[int, ...]
    finish: str
    counters: Counters
    expected: tuple[float, ...]
    steps: tuple[tuple[int, int], ...] = field(repr=False)
    first_token_s: float
    total_s: float
    confidence: tuple[tuple[float, ...], ...] = field(default=(), repr=False)

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first; None for a single token."""
        if len(self.token_ids) < 2:
            return None
        return (self.total_s - self.first_token_s) / (len(self.token_ids) - 1)


def request_seed(request: Request) -> int:
    """Return a seed for another program that depends on the request's seed and id alone."""
    text = f"{request.sampling.seed} {request.id}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def sampling_metadata(requests: Sequence[Request], device: torch.device) -> SamplingMetadata:
    """Return the sampling parameters and noise keys of a batch of requests."""
    sampling = [r.sampling for r in requests]

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    def floats(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    return SamplingMetadata(
        temperature=floats([s.temperature for s in sampling]),
        top_k=ints([s.top_k or 0 for s in sampling]),
        top_p=floats([s.top_p or 1.0 for s in sampling]),
        seed=ints([s.seed for s in sampling]),
        prompt=ints([prompt_key(r.id) for r in requests]),
    )
