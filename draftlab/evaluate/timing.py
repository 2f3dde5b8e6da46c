"""The timing pass: decode a few prompts with every configuration in turn.

The configurations alternate batch by batch, so that a drift of the machine's speed affects all of
them alike. Answers end at stop tokens as the counted ones do, so the rows of a timed batch become
fewer towards its end, with and without drafting.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from draftlab.engine.graphed_step import GraphedStep
from draftlab.engine.sampling import Generation, Request
from draftlab.evaluate.decoding_config import DecodingConfig
from draftlab.kernels.devices import frozen_gc_heap

WARM_UP_TOKENS = 8
PREFILL_TOKENS = 2
"""Tokens of an answer that warms up the prefill of its prompt: the prefill's, and one step's."""


class Decoder(Protocol):
    """An engine that answers requests."""

    def generate(self, requests: Sequence[Request]) -> Iterator[Generation]:
        """Yield each request's generation as it finishes."""


@dataclass
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
    repeated = []
    for copy, place in (divmod(i, len(requests)) for i in range(count)):
        one = requests[place]
        repeated.append(replace(one, id=f"{one.id} (copy {copy})") if copy else one)
    for start in range(0, count, batch):
        yield repeated[start : start + batch]


def warm_up_batches(batch: Sequence[Request]) -> list[list[Request]]:
    """Return short batches of every size for which a shrinking batch has a CUDA graph.

    The first steps of a size pay for kernels that are compiled and a graph that is captured.
    """
    short = _shortened(batch, WARM_UP_TOKENS)
    sizes = {min(GraphedStep.padded_size(n), len(batch)) for n in range(1, len(batch) + 1)}
    return [short[:size] for size in sorted(sizes, reverse=True)]


def warm_up(engine: Decoder, batches: Sequence[list[Request]]) -> None:
    """Decode batches, whose answers are discarded; each size gets its CUDA graph at once."""
    if graphs := getattr(engine, "graphs", None):
        graphs.patience = 0
    for requests in batches:
        list(engine.generate(requests))


def _shortened(batch: Sequence[Request], tokens: int) -> list[Request]:
    return [replace(request, max_new_tokens=tokens) for request in batch]


def time_in_turn(
    engines: Mapping[DecodingConfig, Decoder],
    batches: Sequence[list[Request]],
    progress: Callable[[int, int], None],
) -> dict[DecodingConfig, TimedRun]:
    """Decode the same batches with every engine in turn and return the timed generations.

    Before, every engine decodes short answers to the same prompts, which are discarded: the first
    prefill of a length pays for kernels and a graph, too, so that otherwise the temperature that is
    timed first would have the longest time to the first token. It does so twice if a capture gave
    unused memory back to the GPU, that of other engines, too.

    Args:
        progress: called with the number of finished batches and of all batches.
    """
    runs = {config: TimedRun([], 0.0) for config in engines}
    prefills = [_shortened(batch, PREFILL_TOKENS) for batch in batches]
    for engine in engines.values():
        warm_up(engine, warm_up_batches(batches[0]) + prefills)
    graphs = [getattr(engine, "graphs", None) for engine in engines.values()]
    if any(one is not None and one.emptied for one in graphs):
        for engine in engines.values():
            warm_up(engine, prefills)
    with frozen_gc_heap():
        for number, batch in enumerate(batches, 1):
            for config, engine in engines.items():
                started = time.perf_counter()
                by_id = {g.id: g for g in engine.generate(batch)}
                runs[config].wall_s += time.perf_counter() - started
                runs[config].generations += [by_id[r.id] for r in batch]
            progress(number, len(batches))
    return runs
