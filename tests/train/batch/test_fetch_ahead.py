"""Shards are fetched in the order of the batches, no further ahead than half of the cache."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest

from draftlab.store.shard_cache import ShardCache
from draftlab.store.shard_files import RemoteShardFiles
from draftlab.train.batch.loader import MAX_ITEMS, fetch_ahead
from tests.helpers.list_store import ListStore

SIZE = 100


class Files(RemoteShardFiles):
    """Shards that are noted when they are fetched."""

    def __init__(self, cache: ShardCache) -> None:
        super().__init__("memory://nothing", cache)
        self.fetched: list[int] = []
        self.downloads: list[Future[None]] = []

    def fetch(self, shards: Iterable[SimpleNamespace]) -> list[Future[None]]:
        numbers = [shard.number for shard in shards]
        self.fetched += numbers
        downloads = [Future[None]() for _ in numbers]
        self.downloads += downloads
        return downloads


def remote_store(folder: Path, cached_shards: int) -> SimpleNamespace:
    """Make a store of 1000 shards with ten records each."""
    shards = [SimpleNamespace(number=number, bytes=SIZE) for number in range(1000)]
    return SimpleNamespace(
        files=Files(ShardCache(folder, cached_shards * SIZE)),
        manifest=SimpleNamespace(shards=shards),
        shards_of=lambda records: sorted({record // 10 for record in records}),
    )


@pytest.mark.parametrize("processes", [1, 2])
def test_it_stays_within_half_of_the_cache(processes: int, tmp_path: Path) -> None:
    store = remote_store(tmp_path, 8)
    items = [[10 * n, 10 * n + 11] for n in range(20)]  # two shards each, one of them new
    seen = []
    for item in fetch_ahead(items, list, store, processes=processes):
        present = item[0] // 10
        seen.append(item)
        fetched = set(store.files.fetched)
        assert fetched >= {present, present + 1}
        assert len(fetched) - present <= 4 // processes + 1  # the last item begins below the bound
    assert seen == items
    assert set(store.files.fetched) == set(range(21))
    assert all(download.cancelled() for download in store.files.downloads)


def test_a_shard_is_fetched_again_when_it_was_out_of_sight(tmp_path: Path) -> None:
    store = remote_store(tmp_path, 4)
    items = [[0], [10], [20], [30], [0]]
    assert list(fetch_ahead(items, list, store)) == items
    assert store.files.fetched == [0, 1, 2, 3, 0]


def test_many_items_of_few_shards_are_bounded_too(tmp_path: Path) -> None:
    taken = []

    def items() -> Iterable[list[int]]:
        for number in range(500):
            taken.append(number)
            yield [0]

    ahead = fetch_ahead(items(), list, remote_store(tmp_path, 8))
    next(ahead)
    assert len(taken) == MAX_ITEMS
    ahead.close()


def test_the_end_of_a_validation_does_not_end_the_downloads_of_a_training(tmp_path: Path) -> None:
    store = remote_store(tmp_path, 8)
    training = fetch_ahead([[10 * n] for n in range(20)], list, store)
    next(training)
    downloads = list(store.files.downloads)
    assert list(fetch_ahead([[900], [910]], list, store)) == [[900], [910]]
    assert downloads
    assert not any(download.cancelled() for download in downloads)
    training.close()
    assert all(download.cancelled() for download in downloads)


def test_an_item_larger_than_the_cache_is_read_alone(tmp_path: Path) -> None:
    store = remote_store(tmp_path, 2)
    items = [list(range(0, 200, 10)), [500]]
    assert list(fetch_ahead(items, list, store)) == items


def test_a_local_store_is_left_alone() -> None:
    items = [[0], [1]]
    assert list(fetch_ahead(items, list, ListStore([]))) == items
