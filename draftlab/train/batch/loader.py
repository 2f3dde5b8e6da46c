"""The way of the batches: packed ahead, copied ahead on a stream of their own (CUDA).

    order ─► pack (processes or threads, pinned memory) ─► copy (a thread, a stream) ─► training

Each stage is an iterator that keeps the order, so what training sees does not depend on how many
threads there are or on who was first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from draftlab.train.batch.packing import Batch, map_tensors

THREADS = {"cpu": 1, "cuda": 6}
"""Threads that pack, where no processes do."""
QUEUED = 2
"""Batches whose work may be queued on a GPU: one that runs, one that follows without a gap."""

Item = TypeVar("Item")
_END: Any = object()


def in_one_row(device: torch.device) -> bool:
    """Whether a batch is laid in one row, in which nothing is padded: on a GPU, whose attention
    skips other documents. The CPU's looks at whole rows, and costs the square of their length."""
    return device.type == "cuda"


@dataclass(frozen=True)
class Piece:
    """A micro-batch of an optimizer step.

    Attributes:
        counts, tokens: N_k and real positions of this process's share of the optimizer step.
        first, last: of that share; behind the last the step's gradients are whole.
    """

    batch: Batch
    counts: tuple[int, ...]
    tokens: int
    first: bool
    last: bool


def feed(
    steps: Iterable[Any],
    pack: Callable[[Any], list[Batch]],
    device: torch.device,
    threads: int | None = None,
) -> Iterator[Piece]:
    """The pieces of optimizer steps, in order, on the device, made ahead.

    Args:
        steps: one item an optimizer step.
        pack: makes a step's micro-batches, on threads; pinned for a GPU.
        threads: how many; None: as many as pack well on them.
    """
    packed = in_threads(pack, iter(steps), threads or THREADS.get(device.type, 1))
    pieces = _pieces(packed)
    if device.type != "cuda":
        return ahead(pieces, 1)
    return _arrived(ahead(_copied(pieces, device), 1), device)


@contextmanager
def _ended(items: Iterator[Any]) -> Iterator[None]:
    """Ends a generator behind the block, and with it the threads that it waits for.

    Left to itself it ends with the last reference, and the traceback of an exception keeps those.
    """
    try:
        yield
    finally:
        if isinstance(items, Generator):
            items.close()


def _pieces(packed: Iterator[list[Batch]]) -> Iterator[Piece]:
    with _ended(packed):
        for micro in packed:
            counts = tuple(map(sum, zip(*(batch.counts for batch in micro), strict=True)))
            tokens = sum(batch.num_tokens for batch in micro)
            for number, batch in enumerate(micro, 1):
                yield Piece(batch, counts, tokens, first=number == 1, last=number == len(micro))


def in_threads(make: Callable[[Item], Any], items: Iterator[Item], threads: int) -> Iterator[Any]:
    """make(item) of each item, in their order, begun ahead by so many threads."""
    with ThreadPoolExecutor(threads, "pack") as pool:
        begun: deque[Any] = deque()
        try:
            for item in items:
                begun.append(pool.submit(make, item))
                if len(begun) > threads + 1:
                    yield begun.popleft().result()
            while begun:
                yield begun.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def ahead(items: Iterator[Item], number: int) -> Iterator[Item]:
    """The items, so many of them made ahead by a thread of its own."""
    with _ended(items), ThreadPoolExecutor(1, "ahead") as thread:
        begun = deque(thread.submit(next, items, _END) for _ in range(number))
        while (item := begun.popleft().result()) is not _END:
            begun.append(thread.submit(next, items, _END))
            yield item


def _copied(
    pieces: Iterator[Piece], device: torch.device
) -> Iterator[tuple[Piece, torch.cuda.Event]]:
    """Each piece on its way to the GPU, and the event at which it is there."""
    stream = torch.cuda.Stream(device)
    with _ended(pieces):
        for piece in pieces:
            with torch.cuda.stream(stream):
                batch = piece.batch.to(device)
            yield replace(piece, batch=batch), stream.record_event()


def _arrived(
    pieces: Iterator[tuple[Piece, torch.cuda.Event]], device: torch.device
) -> Iterator[Piece]:
    """The pieces; what is queued after taking one runs once it has arrived."""
    queued: deque[torch.cuda.Event] = deque()
    with _ended(pieces):
        for piece, copied in pieces:
            stream = torch.cuda.current_stream(device)
            stream.wait_event(copied)
            # The memory belongs to the copying stream, which must not have it back too early.
            map_tensors(piece.batch, lambda t, stream=stream: t.record_stream(stream))
            yield piece
            # A host that ran far ahead would fill the GPU's memory with batches.
            queued.append(stream.record_event())
            if len(queued) == QUEUED:
                queued.popleft().synchronize()
