"""Which files of a folder are shards, and their sizes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from draftlab.errors import UserError
from draftlab.store import shard
from draftlab.store.shard import NO_TIME, ShardSizes, shard_file

SHARDS = {0: 3, 7: 0, 99_999: 5, 100_000: 1, 10**17: 2}
OTHERS = (
    *("shard-0.safetensors", "shard-1234.safetensors", "shard-000001.safetensors"),
    *("shard-.safetensors", "shard-12 45.safetensors", "shard--1234.safetensors"),
    *("shard-1_000.safetensors", "shard-+1234.safetensors", f"shard-{10**18}.safetensors"),
    *("shard-١٢٣٤٥.safetensors", "shard-²²²²².safetensors", "shard-00001.safetensors.tmp"),
    *("Shard-00001.safetensors", ".shard-00001.safetensors", "manifest.json", "shard-00001"),
)


@pytest.mark.parametrize("slow_s", [1e9, 0.0], ids=["one thread", "threads"])
def test_only_files_with_names_of_shards_are_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow_s: float
) -> None:
    monkeypatch.setattr(shard, "SLOW_ANSWER_S", slow_s)
    monkeypatch.setattr(shard, "_CHUNK", 3)
    files = {shard_file(number): size for number, size in SHARDS.items()} | dict.fromkeys(OTHERS, 1)
    for name, size in files.items():
        (tmp_path / name).write_bytes(b"x" * size)
    (tmp_path / shard_file(8)).mkdir()
    os.utime(tmp_path / shard_file(7), ns=(1, 123_456_789))
    listed, given = ShardSizes.of(tmp_path), ShardSizes.from_files(files.items())
    for sizes in (listed, given):
        assert dict(zip(sizes.numbers.tolist(), sizes.sizes.tolist(), strict=True)) == SHARDS
    assert listed.first(9).tolist() == [3, *[-1] * 6, 0, -1]
    assert listed.first_modified_ns(9)[[6, 7]].tolist() == [NO_TIME, 123_456_789]
    assert set(given.modified_ns.tolist()) == {NO_TIME}


@pytest.mark.parametrize(("slow_s", "threads"), [(1e9, False), (0.0, True)])
def test_each_shard_is_listed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow_s: float, threads: bool
) -> None:
    """Also those whose answers tell whether threads pay."""
    in_threads, calls = shard._list_in_threads, []
    monkeypatch.setattr(shard, "_list_in_threads", lambda *a: calls.append(a) or in_threads(*a))
    monkeypatch.setattr(shard, "SLOW_ANSWER_S", slow_s)
    monkeypatch.setattr(shard, "_CHUNK", 3)
    for number in range(20):
        (tmp_path / shard_file(number)).touch()
    assert sorted(ShardSizes.of(tmp_path).numbers.tolist()) == list(range(20))
    assert bool(calls) == threads


def test_a_link_in_the_folder_is_followed_and_one_out_of_it_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    (folder / "kept").write_bytes(b"four")
    (folder / shard_file(0)).symlink_to("kept")
    (folder / shard_file(1)).symlink_to("nothing")
    assert ShardSizes.of(folder).first(2).tolist() == [4, -1]
    (tmp_path / "secret").write_bytes(b"secret")
    (folder / shard_file(2)).symlink_to("../secret")
    with pytest.raises(UserError, match="symbolic link that leads out of it"):
        ShardSizes.of(folder)


def test_a_folder_without_files_has_no_shards(tmp_path: Path) -> None:
    assert ShardSizes.of(tmp_path).first(2).tolist() == [-1, -1]
