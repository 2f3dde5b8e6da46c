"""The timing pass: a few prompts, stop tokens ignored, every way of decoding in turn.

Taking turns prompt by prompt (batch by batch) makes a machine whose speed drifts hurt all alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from draftlab.engine.sampling import Generation, Request
from draftlab.evaluate.grid import Arm
from draftlab.progress import Monitor

WARM_UP_TOKENS = 8


class Decoder(Protocol):
    """What answers requests: an engine."""

    def generate(self, requests: Sequence[Request]) -> Iterator[Generation]:
        """Yields each request's result as it finishes."""


@dataclass(frozen=True)
class Timed:
    """Timed generations of one arm, in the order of their requests, and their wall time."""

    generations: list[Generation]
    wall_s: float


def rounds(requests: Sequence[Request], prompts: int, batch: int) -> Iterator[list[Request]]:
    """Requests in full batches until `prompts` were timed; a short suite is taken again.

    A prompt's second copy has an id, so a noise, of its own.
    """
    count = -(-max(prompts, batch) // batch) * batch
    taken = [
        requests[i] if i < len(requests) else _copy(requests[i % len(requests)], i // len(requests))
        for i in range(count)
    ]
    for start in range(0, count, batch):
        yield taken[start : start + batch]


def _copy(request: Request, number: int) -> Request:
    return replace(request, id=f"{request.id} (copy {number})")


def time_arms(
    device: torch.device,
    engines: Mapping[Arm, Decoder],
    requests: Sequence[Request],
    prompts: int,
    batch: int,
    *,
    monitor: Monitor,
    stage: str,
    tick: Callable[[], float] = time.perf_counter,
) -> dict[Arm, Timed]:
    """Decodes the same rounds of requests with every engine, in turn.

    Args:
        device: of the target.
        engines: by arm, each for `batch` rows.
        requests: to take from, in order.
        prompts: timed at least.
        stage: for progress.
        tick: the clock, in seconds.
    """
    found = {arm: Timed([], 0.0) for arm in engines}
    batches = list(rounds(requests, prompts, batch))
    with one_thread(device):
        for engine in engines.values():  # first calls pay for allocation and kernel selection
            list(engine.generate([replace(r, max_new_tokens=WARM_UP_TOKENS) for r in batches[0]]))
        for number, asked in enumerate(batches, 1):
            for arm, engine in engines.items():
                started = tick()
                done = {g.id: g for g in engine.generate(asked)}
                found[arm] = Timed(
                    found[arm].generations + [done[r.id] for r in asked],
                    found[arm].wall_s + tick() - started,
                )
            monitor.progress(stage, number * batch, len(batches) * batch)
    return found


@contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """On a CPU, one thread inside the block: a second one gains little and makes times noisy."""
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
