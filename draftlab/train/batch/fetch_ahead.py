"""Shards at a URL are downloaded for coming batches while the present ones are trained on."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import TypeVar

from draftlab.store.shard_files import RemoteShardFiles
from draftlab.store.store import Store

Item = TypeVar("Item")
MAX_ITEMS = 64
"""Batches for which shards are downloaded ahead."""


def fetch_ahead(
    items: Iterable[Item],
    records_of: Callable[[Item], Sequence[int]],
    store: Store,
    *,
    processes: int = 1,
) -> Iterator[Item]:
    """Yield items; for a store at a URL, begin to download the shards of the following ones.

    The shards in sight take at most half of the cache, so that none leaves it before it is used.

    Args:
        items: optimizer steps, or other groups of records that are read in this order.
        records_of: returns the records that an item reads.
        processes: how many processes of this machine share the cache in this way.
    """
    if not isinstance(store.files, RemoteShardFiles):
        yield from items
        return
    max_bytes = store.files.cache.max_bytes // (2 * processes)
    shards, waiting, items = store.manifest.shards, deque[tuple[Item, list[int]]](), iter(items)
    uses: Counter[int] = Counter()  # of the shards in sight
    downloads: list[Future[None]] = []
    total = 0
    try:
        while True:
            while len(waiting) < MAX_ITEMS and total < max_bytes:
                try:
                    item = next(items)
                except StopIteration:
                    break
                numbers = store.shards_of(records_of(item))
                new = [shards[number] for number in numbers if not uses[number]]
                downloads = [one for one in downloads if not one.done()] + store.files.fetch(new)
                uses.update(numbers)
                total += sum(shard.bytes or 0 for shard in new)
                waiting.append((item, numbers))
            if not waiting:
                return
            item, numbers = waiting.popleft()
            yield item
            for number in numbers:
                uses[number] -= 1
                total -= (shards[number].bytes or 0) * (uses[number] == 0)
    finally:
        for download in downloads:  # its own: a validation fetches while a training does
            download.cancel()
