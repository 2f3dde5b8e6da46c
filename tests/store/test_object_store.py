"""Files at a URL arrive whole or an error says so, and one process may write to it at a time."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from draftlab.errors import UserError
from draftlab.store import object_store
from draftlab.store.object_store import (
    CLAIM,
    LostClaimError,
    UnreachableError,
    UrlClaim,
    UrlFolder,
)
from draftlab.store.shard_cache import ShardCache
from draftlab.store.shard_files import RemoteShardFiles
from draftlab.store.store import Store
from draftlab.store.urls import check_url, is_url
from tests.helpers.object_server import BUCKET, FaultyServer, object_server

NAME = "shard-00000.safetensors"
URL = f"s3://{BUCKET}/store"


server = object_server(retry_s=8.0)


@pytest.fixture
def folder(server: FaultyServer) -> UrlFolder:
    return UrlFolder(URL)


def new_file(path: Path, size: int = 300_000) -> str:
    """Write a file of random bytes; return its SHA-256."""
    path.write_bytes(os.urandom(size))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def once(*faults: str, method: str, part: str = NAME) -> object:
    """Return the faults of the first requests of a method whose path contains a text."""
    left = list(faults)

    def fault(actual: str, path: str, number: int) -> str | None:
        return left.pop(0) if left and actual == method and part in path else None

    return fault


def test_a_file_goes_there_and_back(folder: UrlFolder, tmp_path: Path) -> None:
    digest = new_file(tmp_path / "a")
    assert folder.sizes() == {}
    assert folder.size(NAME) == -1
    assert folder.read(NAME) is None
    assert folder.sha256(NAME) is None
    folder.upload(tmp_path / "a", NAME)
    assert folder.sizes() == {NAME: 300_000}
    assert folder.sha256(NAME) == digest
    assert folder.read(NAME) == (tmp_path / "a").read_bytes()
    folder.download(NAME, tmp_path / "b", 300_000, digest)
    assert (tmp_path / "b").read_bytes() == (tmp_path / "a").read_bytes()
    folder.remove(NAME)
    folder.remove(NAME)
    assert folder.sizes() == {}


def test_a_file_of_several_parts_is_verified_by_its_etag(
    server: FaultyServer, folder: UrlFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "PART_BYTES", 5 << 20)
    new_file(tmp_path / "a", 13 << 20)
    folder.upload(tmp_path / "a", NAME)
    assert server.count("PUT", "partNumber") == 3
    assert server.count("GET") == 0  # it was not read back


def test_an_etag_that_is_no_md5_is_read_back(
    server: FaultyServer, folder: UrlFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "_md5_forms", lambda path: {"of an encrypted object"})
    digest = new_file(tmp_path / "a")
    server.faults = once("changed", method="PUT")
    folder.upload(tmp_path / "a", NAME)
    assert server.count("GET", NAME) >= 2
    assert folder.sha256(NAME) == digest


@pytest.mark.parametrize("fault", ["error", "drop", "short", "changed", "slow"])
def test_an_upload_that_went_wrong_is_repeated(
    fault: str, server: FaultyServer, folder: UrlFolder, tmp_path: Path
) -> None:
    digest = new_file(tmp_path / "a")
    server.faults = once(fault, method="PUT")
    folder.upload(tmp_path / "a", NAME)
    assert server.count("PUT", NAME) == (1 if fault == "slow" else 2)
    assert folder.sha256(NAME) == digest


@pytest.mark.parametrize("fault", ["error", "drop", "cut", "short", "changed", "slow"])
def test_a_download_that_went_wrong_is_repeated(
    fault: str, server: FaultyServer, folder: UrlFolder, tmp_path: Path
) -> None:
    digest = new_file(tmp_path / "a")
    folder.upload(tmp_path / "a", NAME)
    server.requests.clear()
    server.faults = once(fault, method="GET")
    folder.download(NAME, tmp_path / "b", 300_000, digest)
    assert server.count("GET", NAME) == (1 if fault == "slow" else 2)
    assert (tmp_path / "b").read_bytes() == (tmp_path / "a").read_bytes()


def test_a_changed_object_is_noticed(folder: UrlFolder, tmp_path: Path) -> None:
    digest = new_file(tmp_path / "a")
    new_file(tmp_path / "other")
    folder.upload(tmp_path / "other", NAME)
    with pytest.raises(UserError, match=f"damaged: expected SHA-256 {digest}") as caught:
        folder.download(NAME, tmp_path / "b", 300_000, digest)
    assert caught.value.where == f"{URL}/{NAME}"
    with pytest.raises(UserError, match="expected 299999 bytes, found 300000"):
        folder.download(NAME, tmp_path / "b", 299_999, digest)
    with pytest.raises(UserError, match="missing"):
        folder.download("shard-00001.safetensors", tmp_path / "b", 300_000, digest)


def test_a_server_that_stays_down_is_named_and_not_taken_for_empty(
    server: FaultyServer, folder: UrlFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "RETRY_S", 0.6)
    server.is_down = True
    for call in (folder.sizes, lambda: folder.size(NAME), lambda: folder.read(NAME)):
        with pytest.raises(UnreachableError) as caught:
            call()
        assert URL in caught.value.where
        assert "the same command goes on" in caught.value.do
        for secret in ("key-of-the-test", "secret-of-the-test"):
            assert secret not in str(caught.value)


def test_a_refusal_is_named_at_once(
    server: FaultyServer, folder: UrlFolder, tmp_path: Path
) -> None:
    new_file(tmp_path / "a")
    server.faults = lambda *_: "denied"
    calls = (folder.sizes, lambda: folder.upload(tmp_path / "a", NAME), lambda: folder.size(NAME))
    for call in calls:
        server.requests.clear()
        with pytest.raises(UserError, match="was refused: PermissionError") as caught:
            call()
        assert not isinstance(caught.value, UnreachableError)
        assert "docs/guide/scale.md" in caught.value.do
        assert len(server.requests) <= 2


def test_a_full_disk_of_this_machine_is_not_taken_for_a_fault_of_the_server(tmp_path: Path) -> None:
    files = RemoteShardFiles("memory://nothing", ShardCache(tmp_path, 1000))
    calls = []

    def get_file(*_: str) -> None:
        calls.append(1)
        raise OSError(errno.ENOSPC, "No space left on device")

    files.remote.__dict__["_opened"] = SimpleNamespace(get_file=get_file), "/nothing"
    shard = SimpleNamespace(file=NAME, bytes=10, sha256="0" * 64)
    cannot = pytest.raises(UserError, match="the cache cannot be written")
    with cannot as caught, files.local_file(shard):
        pass
    assert "DRAFTLAB_CACHE" in caught.value.do
    assert calls == [1]


def test_a_bucket_that_is_not_there_is_named(server: FaultyServer, tmp_path: Path) -> None:
    new_file(tmp_path / "a")
    with pytest.raises(UserError, match="no such bucket"):
        UrlFolder("s3://another-bucket/store").upload(tmp_path / "a", NAME)
    for url in ("s3://another-bucket", "s3://another-bucket/store"):
        with pytest.raises(UserError, match="no such bucket"):
            Store.open(url)
    with pytest.raises(UserError, match=r"expected a store, found no manifest\.json"):
        Store.open(URL)
    server.faults = lambda *_: "denied"
    with pytest.raises(UserError, match="was refused: PermissionError"):
        Store.open(URL)


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIA:SECRET@bucket/store",
        "s3://bucket/store?X-Amz-Signature=SECRET",
        "simplecache::s3://AKIA:SECRET@bucket",
        "s3:///store",
        "s3://bucket/a/../b",
        "bucket/store",
    ],
)
def test_urls_with_secrets_and_other_texts_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="expected") as caught:
        check_url(url)
    assert "SEC" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["s3://bucket", "s3://bucket/a/b", "gs://b/c", "hf://datasets/me/store", "memory://x"]
)
def test_urls_of_folders_are_accepted(url: str) -> None:
    assert check_url(url) == check_url(f"{url}/") == url
    assert is_url(url)


def test_a_folder_is_named_by_its_path() -> None:
    assert not is_url("runs/a/store")
    with pytest.raises(ValueError, match="name a store by its path"):
        check_url("file:///a/b")


def new_claim(folder: Path) -> UrlClaim:
    folder.mkdir(exist_ok=True)
    return UrlClaim(UrlFolder(URL), folder)


def test_the_last_one_has_it(server: FaultyServer, tmp_path: Path) -> None:
    first, second = (new_claim(tmp_path / name) for name in ("a", "b"))
    with pytest.raises(LostClaimError):
        first.check()
    assert first.take("plan") == ""
    first.check()
    new_claim(tmp_path / "a").check()  # another process with the same folder
    assert new_claim(tmp_path / "a").take("plan") == "", "after it was killed"
    assert ", begun 20" in second.take("plan")
    second.check()
    for one in (first, new_claim(tmp_path / "a")):
        with pytest.raises(LostClaimError, match=r"begun to write there \(on .*, begun 20"):
            one.check()
    first.release()  # not its own any more
    second.check()
    with pytest.raises(UserError, match="another run writes there"):
        first.take("another plan")
    second.check()
    second.release()
    assert UrlFolder(URL).read(CLAIM) is None
    with pytest.raises(LostClaimError, match="has been removed"):
        second.check()
    assert first.take("another plan") == ""


def test_what_another_has_created_is_not_created_again(server: FaultyServer) -> None:
    """Both have seen an empty URL; which of them creates the object, the file system decides."""
    first, second = UrlFolder(URL), UrlFolder(URL)
    assert first.size(CLAIM) == second.size(CLAIM) == -1
    assert first.create(CLAIM, b"first")
    assert not second.create(CLAIM, b"second")
    assert second.read(CLAIM) == b"first"


def test_an_answer_that_is_lost_leaves_the_claim_with_its_writer(
    server: FaultyServer, tmp_path: Path
) -> None:
    """The object is written and the connection ends, so that the write is repeated."""
    left = ["cut"]
    server.faults = lambda method, path, number: left.pop() if method == "PUT" and left else None
    claim = new_claim(tmp_path / "a")
    assert claim.take("plan") == ""
    claim.check()


def test_a_claim_that_is_of_something_else_stays(server: FaultyServer, tmp_path: Path) -> None:
    UrlFolder(URL).write(CLAIM, b"something else")
    with pytest.raises(UserError, match="another run writes there"):
        new_claim(tmp_path / "a").take("plan")
    UrlFolder(URL).write(CLAIM, json.dumps([1]).encode())
    with pytest.raises(UserError, match="another run writes there"):
        new_claim(tmp_path / "a").take("plan")
