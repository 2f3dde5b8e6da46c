"""The cache of downloaded files: its bound, what it trusts, and processes that share it."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from draftlab.errors import UserError
from draftlab.store import shard_cache
from draftlab.store.shard_cache import ShardCache, machine_cache
from tests.helpers.caches import cached_bytes

SIZE = 1000


def content(number: int) -> bytes:
    return bytes([number]) * SIZE


def digest(number: int) -> str:
    return hashlib.sha256(content(number)).hexdigest()


def read(cache: ShardCache, number: int, log: Path | None = None, pause: float = 0.0) -> bytes:
    """Read a file, which is downloaded if it is not in the cache; downloads append to a log."""

    def download(path: Path) -> None:
        time.sleep(pause)
        path.write_bytes(content(number))
        if log is not None:
            with open(log, "a") as file:
                file.write(f"{number}\n")

    with cache.file(digest(number), SIZE, download, f"file {number}") as path:
        return path.read_bytes()


def never(path: Path) -> None:
    raise AssertionError("it was there")


def test_files_are_downloaded_once_and_the_oldest_goes_first(tmp_path: Path) -> None:
    cache, log = ShardCache(tmp_path / "cache", 3 * SIZE), tmp_path / "log"
    for number in (1, 2, 3, 1, 4, 1, 2):  # 4 takes the place of 2
        assert read(cache, number, log) == content(number)
        assert cached_bytes(cache) <= 3 * SIZE
    assert log.read_text().split() == ["1", "2", "3", "4", "2"]
    assert [digest(n) in cache for n in (1, 2, 3, 4)] == [True, True, False, True]


def test_mapped_memory_stays_valid_when_a_file_goes(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, SIZE)
    read(cache, 1)
    with cache.file(digest(1), SIZE, never, "") as path:
        mapped = np.memmap(path, np.uint8, "r")
    read(cache, 2)
    assert not path.exists()
    assert mapped.tobytes() == content(1)


def test_a_file_that_is_added_is_not_taken_for_one_of_a_killed_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread looks for such files when the added one gets the time of checked files."""
    cache, plain = ShardCache(tmp_path, SIZE), os.utime

    def set_time_and_look(path: Path, **times: tuple[int, int]) -> None:
        plain(path, **times)
        with cache.temporary():
            pass

    monkeypatch.setattr(os, "utime", set_time_and_look)
    with cache.temporary() as path:
        path.write_bytes(content(1))
        cache.add(path, digest(1))
    assert digest(1) in cache


def test_a_file_that_is_read_does_not_go(tmp_path: Path) -> None:
    cache, order = ShardCache(tmp_path, SIZE), []
    read(cache, 1)
    with ThreadPoolExecutor(1) as pool:
        with cache.file(digest(1), SIZE, never, "") as path:
            other = pool.submit(lambda: (read(cache, 2), order.append("other")))
            time.sleep(0.3)
            assert path.read_bytes() == content(1)
            order.append("reader")
        other.result(10)
    assert order == ["reader", "other"]


@pytest.mark.parametrize("change", ["same size", "other size", "time"])
def test_a_file_that_was_changed_is_not_trusted(change: str, tmp_path: Path) -> None:
    cache, log = ShardCache(tmp_path / "cache", 2 * SIZE), tmp_path / "log"
    read(cache, 1, log)
    path = tmp_path / "cache/shards" / digest(1)
    if change == "time":  # it is hashed again, and is whole
        os.utime(path)
    else:
        path.write_bytes(content(2) if change == "same size" else b"short")
    assert read(cache, 1, log) == content(1)
    assert len(log.read_text().split()) == (1 if change == "time" else 2)
    assert path.stat().st_mtime_ns == shard_cache.CHECKED_NS


def test_a_link_in_the_cache_is_not_followed(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path / "cache", 2 * SIZE)
    (tmp_path / "secret").write_bytes(content(1))
    (tmp_path / "cache/shards" / digest(1)).symlink_to(tmp_path / "secret")
    with pytest.raises(OSError, match="symbolic"):
        read(cache, 1)


def test_a_download_that_fails_leaves_nothing(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, SIZE)

    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise UserError("damaged")

    with pytest.raises(UserError, match="damaged"), cache.file(digest(1), SIZE, fail, ""):
        pass
    assert cached_bytes(cache) == 0
    assert read(cache, 1) == content(1)


def test_a_file_larger_than_the_cache_is_refused(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, SIZE - 1)
    with pytest.raises(UserError, match="expected a cache that holds") as caught:
        read(cache, 1)
    assert "DRAFTLAB_CACHE_SIZE" in caught.value.do


def _run_processes(target: Callable[..., None], *arguments: tuple[object, ...]) -> None:
    context = multiprocessing.get_context("fork")
    failed = context.Queue()

    def run(*one: object) -> None:
        try:
            target(*one)
        except BaseException as error:
            failed.put(repr(error))
            raise

    processes = [context.Process(target=run, args=one) for one in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert failed.empty(), failed.get()
    assert [process.exitcode for process in processes] == [0] * len(processes)


def _process(folder: Path, log: Path, seed: int) -> None:
    """Read files in a random order; the bound holds at any time."""
    cache = ShardCache(folder, 4 * SIZE)
    for number in np.random.default_rng(seed).integers(0, 8, 60).tolist():
        assert read(cache, number, log, pause=0.001) == content(number)
        assert cached_bytes(cache) <= 4 * SIZE


def test_processes_share_the_bound(tmp_path: Path) -> None:
    log = tmp_path / "log"
    _run_processes(_process, *((tmp_path / "cache", log, seed) for seed in range(4)))
    assert not list((tmp_path / "cache/shards").glob("*.part"))


def _reader(folder: Path, log: Path) -> None:
    for number in range(5):
        assert read(ShardCache(folder, 10 * SIZE), number, log, 0.05) == content(number)


def test_processes_download_a_file_once(tmp_path: Path) -> None:
    _run_processes(_reader, *((tmp_path / "cache", tmp_path / "log") for _ in range(3)))
    assert sorted((tmp_path / "log").read_text().split()) == list("01234")


def _dies(folder: Path) -> None:
    def die(path: Path) -> None:
        path.write_bytes(b"half")
        os._exit(0)

    with ShardCache(folder, SIZE).file(digest(1), SIZE, die, ""):
        pass


def test_the_download_of_a_process_that_died_makes_room(tmp_path: Path) -> None:
    _run_processes(_dies, (tmp_path,))
    assert len(list((tmp_path / "shards").glob("*.part"))) == 1
    assert read(ShardCache(tmp_path, SIZE), 2) == content(2)
    assert not list((tmp_path / "shards").glob("*.part"))


def test_the_environment_decides_folder_and_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTLAB_CACHE", str(tmp_path / "a"))
    monkeypatch.setenv("DRAFTLAB_CACHE_SIZE", "1.5 MB")
    machine_cache.cache_clear()
    cache = machine_cache()
    assert (cache.folder, cache.max_bytes) == (tmp_path / "a", 1_500_000)
    monkeypatch.setenv("DRAFTLAB_CACHE_SIZE", "plenty")
    machine_cache.cache_clear()
    with pytest.raises(UserError, match="expected a size such as 200GB"):
        machine_cache()
    machine_cache.cache_clear()
