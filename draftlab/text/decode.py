"""What decodes the requests of answers: by default the target's own engine in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from draftlab.engine.engine import Engine, decoding_threads
from draftlab.engine.sampling import Generation, Request
from draftlab.progress import Monitor
from draftlab.target_model.model import Target

Decode = Callable[[Sequence[Request], int], Iterator[Generation]]
"""A function that decodes requests, in any order. Its second argument is the largest length that a
prompt and its answer can reach together, in tokens; requests have their own limits."""

T = TypeVar("T")


def answer_engine(target: Target, batch: int, max_length: int, monitor: Monitor) -> Engine:
    """Return an engine for answers, which runs `batch` requests at once.

    The larger the batch, the smaller the target: its prefills then take more tokens a pass, since
    the host otherwise takes longer to launch them than the GPU to run them.
    """
    return Engine(
        target,
        batch=batch,
        max_length=max_length,
        prefill_tokens=min(max(8 * batch, 2048), 16384),
        cpu_prepacked=True,
        monitor=monitor,
    )


def engine_decode(target: Target, batch: int, monitor: Monitor | None = None) -> Decode:
    """Return a `Decode` that runs the target's own engine on `batch` requests at once.

    It keeps the engine for later calls: on a GPU one captures dozens of graphs, each of which takes
    as long as a hundred steps.

    Args:
        monitor: told if memory is short for so many requests.
    """
    monitor = monitor or Monitor()
    engine: Engine | None = None

    def decode(requests: Sequence[Request], max_length: int) -> Iterator[Generation]:
        nonlocal engine
        size, old_size, old_length = min(batch, len(requests)), 0, 0
        if engine is not None:
            old_size, old_length = engine.input_batch.num_slots, engine.max_length
        elif target.device.type == "cuda":
            monitor.say(
                "answers: the first ones wait until kernels are compiled, a minute on a new machine"
            )
        if size > old_size or max_length > old_length:
            engine = None  # the next one needs its memory
            larger = max(size, old_size), max(max_length, old_length)
            engine = answer_engine(target, *larger, monitor)
        with decoding_threads(target):
            yield from engine.generate(requests)

    return decode


def in_order(numbered: Iterator[tuple[int, T]]) -> Iterator[T]:
    """Yield values in the order of their numbers 0, 1, …, in which they need not come."""
    early: dict[int, T] = {}
    following = 0
    for number, value in numbered:
        early[number] = value
        while following in early:
            yield early.pop(following)
            following += 1
