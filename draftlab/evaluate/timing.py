"""The timing pass: decode a few prompts with every configuration in turn, ignoring stop tokens.

The configurations alternate batch by batch, so that a drift of the machine's speed affects all of
them alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from draftlab.engine.sampling import Generation, Request
from draftlab.evaluate.grid import DecodingConfig
from draftlab.progress import Monitor

WARM_UP_TOKENS = 8


class Decoder(Protocol):
    """An engine that answers requests."""

    def generate(self, requests: Sequence[Request]) -> Iterator[Generation]:
        """Yield each request's generation as it finishes."""


@dataclass(frozen=True)
class TimedRun:
    """Generations of one configuration, in the order of their requests, and their wall time."""

    generations: list[Generation]
    wall_s: float


def timing_batches(
    requests: Sequence[Request], prompts: int, batch: int
) -> Iterator[list[Request]]:
    """Yield full batches with at least `prompts` requests; a short suite is repeated.

    The second copy of a prompt has its own id, and so its own sampling noise.
    """
    count = -(-max(prompts, batch) // batch) * batch
    repeated = [_copy(requests[i % len(requests)], i // len(requests)) for i in range(count)]
    for start in range(0, count, batch):
        yield repeated[start : start + batch]


def _copy(request: Request, number: int) -> Request:
    return replace(request, id=f"{request.id} (copy {number})") if number else request


def time_in_turn(
    device: torch.device,
    engines: Mapping[DecodingConfig, Decoder],
    requests: Sequence[Request],
    prompts: int,
    batch: int,
    *,
    monitor: Monitor,
    stage: str,
    tick: Callable[[], float] = time.perf_counter,
) -> dict[DecodingConfig, TimedRun]:
    """Decode the same batches with every engine in turn and return the timed generations.

    Args:
        device: device of the target.
        engines: one engine per configuration, each for `batch` rows.
        requests: requests of the suite, in order.
        prompts: the least number of prompts to time.
        stage: stage name for progress.
        tick: clock, in seconds.
    """
    runs = {config: TimedRun([], 0.0) for config in engines}
    batches = list(timing_batches(requests, prompts, batch))
    with one_thread(device):
        for engine in engines.values():  # first calls pay for allocation and kernel selection
            list(engine.generate([replace(r, max_new_tokens=WARM_UP_TOKENS) for r in batches[0]]))
        for number, chunk in enumerate(batches, 1):
            for config, engine in engines.items():
                started = tick()
                by_id = {g.id: g for g in engine.generate(chunk)}
                runs[config] = TimedRun(
                    runs[config].generations + [by_id[r.id] for r in chunk],
                    runs[config].wall_s + tick() - started,
                )
            monitor.progress(stage, number * batch, len(batches) * batch)
    return runs


@contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """Limit torch to one CPU thread: a second one gains little and makes times noisy."""
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
