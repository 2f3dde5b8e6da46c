"""What a cache of shards holds."""

from __future__ import annotations

from draftlab.files import locked
from draftlab.store.shard_cache import ShardCache


def cached_bytes(cache: ShardCache) -> int:
    """Return the size of all files, downloads that have begun among them."""
    with locked(cache.folder / ".lock", wait=True):
        return sum(size for _, size, _ in cache._entries())
