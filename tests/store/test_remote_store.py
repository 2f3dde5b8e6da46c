"""A store whose shards are at a URL: the bytes of a local one, whatever fails on the way."""

from __future__ import annotations

import os
import pickle
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from draftlab.errors import UserError
from draftlab.progress import Monitor
from draftlab.store import object_store
from draftlab.store.manifest import MANIFEST
from draftlab.store.merge import merge
from draftlab.store.object_store import UnreachableError, UrlFolder
from draftlab.store.record_index import RECORDS
from draftlab.store.shard import SHARDS
from draftlab.store.shard_cache import machine_cache
from draftlab.store.store import Store
from draftlab.target_model.model import Target
from tests.helpers.caches import cached_bytes
from tests.helpers.object_server import BUCKET, FaultyServer, empty_cache, object_server, objects
from tests.helpers.recordings import exit_codes, fork_recorder, make_samples, record_store

URL = f"s3://{BUCKET}/store"


server = object_server(retry_s=10.0)


def files(folder: Path) -> dict[str, bytes]:
    """Return a store's files."""
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.name != ".lock"}


def put(name: str, content: bytes, tmp_path: Path) -> None:
    """Replace an object."""
    (tmp_path / "object").write_bytes(content)
    UrlFolder(URL).upload(tmp_path / "object", name)


def same_records(one: Store, other: Store) -> bool:
    pairs = zip(one, other, strict=True)
    return all(
        a.id == b.id
        and a.tokens.equal(b.tokens)
        and a.spans.equal(b.spans)
        and a.features.equal(b.features)
        and a.last.equal(b.last)
        and torch.equal(a.logsumexp.nan_to_num(), b.logsumexp.nan_to_num())
        for a, b in pairs
    )


def test_the_url_is_a_store_with_the_bytes_of_a_local_one(
    server: FaultyServer, target: Target, tmp_path: Path
) -> None:
    local = record_store(target, tmp_path / "local")
    remote = record_store(target, tmp_path / "remote", url=URL)
    assert objects(URL) == files(tmp_path / "local")
    assert set(files(tmp_path / "remote")) == {MANIFEST, RECORDS, SHARDS}
    assert remote.address == URL
    opened = Store.open(URL)
    assert same_records(opened, local)
    assert same_records(remote, local)
    assert opened.digest == local.digest == remote.digest
    for store in (opened, remote):
        assert same_records(pickle.loads(pickle.dumps(store)), local)


def test_shards_that_were_recorded_here_are_not_downloaded(
    server: FaultyServer, target: Target, tmp_path: Path
) -> None:
    store = record_store(target, tmp_path / "store", url=URL)
    server.requests.clear()
    list(store)
    assert server.requests == []


def test_faults_change_nothing(
    server: FaultyServer, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = record_store(target, tmp_path / "local")
    generator = random.Random(0)

    def fault(method: str, path: str, number: int) -> str | None:
        kinds = ["error", "drop", "short", "changed", "cut", "slow"]
        is_content = ".safetensors" in path and method in ("GET", "PUT")
        return generator.choice(kinds if is_content else ["error", "drop"]) * (
            generator.random() < 0.15
        )

    monkeypatch.setattr(object_store, "DAMAGED_DOWNLOADS", 10)
    server.faults = fault
    record_store(target, tmp_path / "remote", url=URL)
    empty_cache()
    assert same_records(Store.open(URL), local)
    server.faults = lambda *_: None
    assert objects(URL) == files(tmp_path / "local")


def test_a_truncated_upload_is_never_committed(
    server: FaultyServer, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "RETRY_S", 0.6)
    record_store(target, tmp_path / "local")
    last = "shard-00002.safetensors"
    server.faults = lambda method, path, _: "short" if method == "PUT" and last in path else None
    with pytest.raises(UnreachableError, match="the server has") as caught:
        record_store(target, tmp_path / "remote", url=URL)
    assert caught.value.where == f"{URL}/{last}"
    with pytest.raises(UserError, match="interrupted"):
        Store.open(URL)
    assert not (tmp_path / "remote/shard-00002.json").exists()
    committed = {path.stem for path in (tmp_path / "remote").glob("shard-*.json")}
    assert committed
    server.faults = lambda *_: None
    server.requests.clear()
    record_store(target, tmp_path / "remote", url=URL)
    for name in committed:  # what was committed is not sent again
        assert server.count("PUT", name) == 0
    assert objects(URL) == files(tmp_path / "local")


def test_a_killed_recording_goes_on(
    server: FaultyServer, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = record_store(target, tmp_path / "local")
    for _ in range(3):
        child = fork_recorder(target, tmp_path / "remote", pause=0.05, url=URL)
        count = len(list((tmp_path / "remote").glob("shard-*.json")))
        end = time.monotonic() + 20
        while len(list((tmp_path / "remote").glob("shard-*.json"))) == count:
            assert time.monotonic() < end
            time.sleep(0.01)
        os.kill(child, signal.SIGKILL)
        assert exit_codes(child) == [-signal.SIGKILL]
    remote = record_store(target, tmp_path / "remote", url=URL)
    assert objects(URL) == files(tmp_path / "local")
    assert same_records(remote, local)


def test_a_changed_object_is_noticed_when_it_is_read(
    server: FaultyServer, target: Target, tmp_path: Path
) -> None:
    store = record_store(target, tmp_path / "store", url=URL)
    file = store.manifest.shards[1].file
    content = UrlFolder(URL).read(file)
    put(file, content[:-1] + bytes([content[-1] ^ 1]), tmp_path)
    with pytest.raises(UserError, match="the shard is damaged") as caught:
        Store.open(URL).verify()
    assert caught.value.where == f"{URL}/{file}"
    empty_cache()
    with pytest.raises(UserError, match="damaged: expected SHA-256") as caught:
        list(Store.open(URL))
    assert caught.value.where == f"{URL}/{file}"
    put(file, content[:-1], tmp_path)
    with pytest.raises(UserError, match=r"truncated or belongs to another store"):
        Store.open(URL)
    # The same command records this shard again.
    record_store(target, tmp_path / "store", url=URL)
    assert UrlFolder(URL).read(file) == content


def test_a_changed_manifest_is_noticed(
    server: FaultyServer, target: Target, tmp_path: Path
) -> None:
    record_store(target, tmp_path / "store", url=URL)
    table = UrlFolder(URL).read(SHARDS)
    put(SHARDS, table[:-1] + bytes([table[-1] ^ 1]), tmp_path)
    with pytest.raises(UserError, match="damaged") as caught:
        Store.open(URL)
    assert caught.value.where == f"{URL}/{SHARDS}"
    put(SHARDS, table, tmp_path)
    assert len(Store.open(URL)) == 12
    put(MANIFEST, b"{", tmp_path)
    with pytest.raises(UserError, match="not JSON"):
        Store.open(URL)
    with pytest.raises(UserError, match="no manifest"):
        Store.open(f"s3://{BUCKET}/nothing")


def test_opening_takes_a_few_requests(server: FaultyServer, target: Target, tmp_path: Path) -> None:
    store = record_store(target, tmp_path / "store", url=URL, shard_tokens=40)
    assert len(store.manifest.shards) >= 8
    Store.open(URL)
    server.requests.clear()
    Store.open(URL)
    Store.open(tmp_path / "store", url=URL)
    assert len(server.requests) <= 4, server.requests
    server.requests.clear()
    record_store(target, tmp_path / "store", url=URL, shard_tokens=40)
    assert len(server.requests) <= 12, server.requests


def test_a_cache_smaller_than_the_store_is_enough(
    server: FaultyServer, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = record_store(target, tmp_path / "local")
    size = max(shard.bytes for shard in local.manifest.shards)
    monkeypatch.setenv("DRAFTLAB_CACHE_SIZE", f"{2 * size}B")
    machine_cache.cache_clear()
    record_store(target, tmp_path / "remote", url=URL)
    store = Store.open(URL)
    for index in random.Random(0).sample(range(12), 12):
        assert store[index].features.equal(local[index].features)
        assert cached_bytes(machine_cache()) <= 2 * size


def test_shards_are_fetched_ahead(server: FaultyServer, target: Target, tmp_path: Path) -> None:
    store = record_store(target, tmp_path / "store", url=URL)
    empty_cache()
    store.files.fetch(store.manifest.shards)
    end = time.monotonic() + 20
    while any(shard.sha256 not in machine_cache() for shard in store.manifest.shards):
        assert time.monotonic() < end
        time.sleep(0.01)
    server.requests.clear()
    list(store)
    assert server.requests == []


def test_the_store_of_another_recording_is_not_overwritten(
    server: FaultyServer, target: Target, tmp_path: Path
) -> None:
    record_store(target, tmp_path / "one", url=URL)
    before = objects(URL)
    with pytest.raises(UserError, match="the URL has another store") as caught:
        record_store(target, tmp_path / "two", make_samples(5), url=URL)
    assert caught.value.where == URL
    assert "record.url" in caught.value.do
    assert objects(URL) == before


def test_stores_are_made_of_remote_ones(
    server: FaultyServer, target: Target, tmp_path: Path
) -> None:
    local = record_store(target, tmp_path / "local")
    record_store(target, tmp_path / "remote", url=URL)
    merged = merge([Store.open(URL)], tmp_path / "merged", Monitor())
    assert same_records(merged, local)
    merged.verify()
    assert not os.path.samefile(
        tmp_path / "merged/shard-00000.safetensors",
        machine_cache().folder / "shards" / merged.manifest.shards[0].sha256,
    )


def test_any_file_system_of_fsspec_will_do(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTLAB_CACHE", str(tmp_path / "cache"))
    machine_cache.cache_clear()
    local = record_store(target, tmp_path / "local")
    url = f"memory://{tmp_path.name}/store"
    record_store(target, tmp_path / "remote", url=url)
    assert objects(url) == files(tmp_path / "local")
    empty_cache()
    assert same_records(Store.open(url), local)
    with pytest.raises(UserError, match="missing") as caught:
        Store.open(tmp_path / "remote")
    assert "record.url" in caught.value.do
    machine_cache.cache_clear()
