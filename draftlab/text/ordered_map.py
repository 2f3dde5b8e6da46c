"""Work dealt to several workers, and taken back in its order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TypeVar

Item = TypeVar("Item")
Worker = TypeVar("Worker")


def dealt(
    work: Callable[[Item, Worker], None],
    items: Sequence[Item],
    workers: Sequence[Worker],
    stop: Callable[[], None],
) -> Iterator[Item]:
    """The items in their order when they are done, each by a worker that was free.

    One worker works on the caller's thread, several on one each. To be closed: what fails, or is
    broken off, ends all.

    Args:
        stop: has work that is being done return early, undone.
    """
    if len(workers) == 1:
        for item in items:
            work(item, workers[0])
            yield item
        return
    free: SimpleQueue[Worker] = SimpleQueue()
    for worker in workers:
        free.put(worker)

    def done(item: Item) -> Item:
        worker = free.get()
        try:
            work(item, worker)
        finally:
            free.put(worker)
        return item

    with ThreadPoolExecutor(len(workers), "dealt") as pool:
        try:
            yield from pool.map(done, items)
        finally:
            stop()
            pool.shutdown(cancel_futures=True)
