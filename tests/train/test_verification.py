"""Checkpoints do not wait for the hashing of shards, and no head is made of a damaged shard."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load

from draftlab.errors import UserError
from draftlab.files import sha256_file
from draftlab.progress import Monitor
from draftlab.store import shard_files
from draftlab.store.columns import write_columns
from draftlab.store.record_index import RecordIndex
from draftlab.store.shard import NO_TIME, Shards, ShardTable, WrittenShard
from draftlab.store.shard_files import ShardFiles
from draftlab.store.store import Store
from draftlab.train import loop
from draftlab.train.distributed.ranks import Ranks
from draftlab.train.verification import VERIFIED, ShardVerification
from tests.helpers.list_store import ListStore
from tests.helpers.monitors import RecordingMonitor
from tests.helpers.small_run import SignallingMonitor
from tests.helpers.toy_training import assert_same_weights, orthogonal_parts, toy_answer, trained

SETTINGS = {"steps": 6, "checkpoint_every": 4, "log_every": 1}


class ShardedStore(ListStore):
    """Records in memory, and three files that are hashed as their shards."""

    verify, digest, _how_to_remake = Store.verify, Store.digest, Store._how_to_remake

    def __init__(self, folder: Path, count: int = 24) -> None:
        super().__init__([toy_answer(orthogonal_parts(), i) for i in range(count)])
        self.folder, self._verified = folder, set[int]()
        self.files = ShardFiles(folder)
        folder.mkdir(exist_ok=True)
        for number in range(3):
            if not self.path(number).exists():
                self.path(number).write_bytes(bytes([number]) * 100)
        written = [WrittenShard(bytes=100, sha256=sha256_file(self.path(n))) for n in range(3)]
        index = RecordIndex.of(self.ids, self.lengths, [None] * count, [count, 0, 0])
        self.manifest.shards = Shards(index, ShardTable.of(index, 0, written))

    def path(self, number: int) -> Path:
        return self.folder / f"shard-{number:05d}.safetensors"


def wait_for(condition: Callable[[], bool]) -> bool:
    """Return whether a condition became true within five seconds."""
    end = time.monotonic() + 5
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def test_a_checkpoint_does_not_wait_for_the_hashing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, store = orthogonal_parts(), ShardedStore(tmp_path / "store")
    whole = trained(tmp_path / "whole", store, target, **SETTINGS)
    run, good = tmp_path / "run", store.path(2).read_bytes()
    checkpoint, verified = run / "checkpoints/step-0000002", run / VERIFIED
    store.path(2).write_bytes(good[:-1] + b"?")
    hashed: list[str] = []

    def slow_hash(path: Path) -> str:
        if path.parent == store.folder:
            hashed.append(path.name)
            if path == store.path(1):
                assert wait_for(verified.exists), "the first shard's hash is not remembered"
                assert wait_for(checkpoint.exists), "the checkpoint waits for the hashing"
        return sha256_file(path)

    monkeypatch.setattr(shard_files, "known_sha256", slow_hash)
    store._verified.clear()
    with pytest.raises(SystemExit):
        trained(run, store, target, SignallingMonitor(signal.SIGTERM, 2), **SETTINGS)
    assert json.loads((checkpoint / "state.json").read_text())["verified"] is False
    times = load(verified.read_bytes())["modified_ns"].tolist()
    assert times == [os.stat(store.path(n)).st_mtime_ns for n in range(2)] + [NO_TIME]

    hashed.clear()
    store._verified.clear()
    monitor = RecordingMonitor()
    with pytest.raises(UserError, match=r"must be removed: .*step-0000002\.damaged") as error:
        trained(run, store, target, monitor, **SETTINGS)
    assert error.value.where == str(store.path(2))
    assert hashed == [store.path(2).name]
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    assert [row["step"] for row in rows] == [1, 2]

    store.path(2).write_bytes(good)  # what was trained with the damaged shard is not used
    resumed = trained(run, store, target, monitor, **SETTINGS)
    assert monitor.lines.count("resuming training after step 2") == 1
    assert_same_weights(whole, resumed)
    state = json.loads((run / "checkpoints/step-0000006/state.json").read_text())
    assert state["verified"] is True


def test_a_training_that_was_killed_before_its_mark_gets_it_when_it_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, store = orthogonal_parts(), ShardedStore(tmp_path / "store")
    state = tmp_path / "run/checkpoints/step-0000006/state.json"

    def slow_hash(path: Path) -> str:  # until the last checkpoint is there, whose shards are read
        assert path.parent != store.folder or wait_for(state.exists)
        return sha256_file(path)

    def killed(path: Path) -> None:
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(shard_files, "known_sha256", slow_hash)
        patch.setattr(loop, "mark_verified", killed)
        with pytest.raises(SystemExit):
            trained(tmp_path / "run", store, target, **SETTINGS)
    assert json.loads(state.read_text())["verified"] is False
    trained(tmp_path / "run", store, target, **SETTINGS)
    assert json.loads(state.read_text())["verified"] is True


def test_a_damaged_shard_that_a_later_thread_finds_sets_checkpoints_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the thread that ran beside the training still hashes its own shard."""
    target, store = orthogonal_parts(), ShardedStore(tmp_path / "store")
    checkpoints = tmp_path / "run/checkpoints"
    damaged, aside = store.path(2), checkpoints / "step-0000006.damaged"
    damaged.write_bytes(b"?" * 100)

    def slow_hash(path: Path) -> str:
        assert path != store.path(0) or wait_for(aside.exists)
        return sha256_file(path)

    monkeypatch.setattr(shard_files, "known_sha256", slow_hash)
    with pytest.raises(UserError, match=r"must be removed: .*step-0000006\.damaged") as error:
        trained(tmp_path / "run", store, target, **SETTINGS)
    assert error.value.where == str(damaged)
    assert not list(checkpoints.glob("step-???????"))


class ThreadRanks:
    """Two ranks that are threads of this process."""

    size = 2

    def __init__(self, rank: int, values: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.is_main = rank, rank == 0
        self.values, self.barrier = values, barrier

    def all_gather(self, value: Any) -> list[Any]:
        self.values[self.rank] = value
        self.barrier.wait()
        values = list(self.values)
        self.barrier.wait()
        return values

    def broadcast(self, value: Any) -> Any:
        return self.all_gather(value)[0]


@pytest.mark.parametrize("all_remembered", [True, False])
def test_ranks_agree_on_the_shards_though_their_files_look_different(
    tmp_path: Path, all_remembered: bool
) -> None:
    """As on two machines that mount one folder: another inode and time of the last change."""
    store = ShardedStore(tmp_path / "store")
    times = [os.stat(store.path(number)).st_mtime_ns for number in range(3)]
    if not all_remembered:
        times[2] = NO_TIME
    write_verified(tmp_path, store, times)
    shutil.copytree(store.folder, tmp_path / "mounted")
    other = ShardedStore(tmp_path / "mounted")
    os.utime(other.path(0), ns=(1, 1))
    values, barrier = [None, None], threading.Barrier(2, timeout=5)

    def verify(rank: int) -> list[int]:
        ranks = ThreadRanks(rank, values, barrier)
        verification = ShardVerification((store, other)[rank], tmp_path, ranks)  # type: ignore[arg-type]
        verification.finish(Monitor())
        verification.close()
        return verification.pending.tolist()

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(verify, range(2))) == [[] if all_remembered else [2]] * 2
    times = load((tmp_path / VERIFIED).read_bytes())["modified_ns"].tolist()
    assert len(times) == 3
    assert NO_TIME not in times


@pytest.mark.parametrize("change", ["another store", "a torn file"])
def test_shards_are_hashed_again_if_the_file_says_nothing_of_them(
    tmp_path: Path, change: str
) -> None:
    store = ShardedStore(tmp_path / "store")
    times = [os.stat(store.path(number)).st_mtime_ns for number in range(3)]
    write_verified(tmp_path, store, times)
    path = tmp_path / VERIFIED
    if change == "another store":
        write_columns(load(path.read_bytes()) | {"store_sha256": np.zeros(32, np.uint8)}, path)
    else:
        path.write_bytes(path.read_bytes()[:-9])
    verification = ShardVerification(store, tmp_path, Ranks(0, 1, torch.device("cpu")))  # type: ignore[arg-type]
    assert verification.pending.tolist() == [0, 1, 2]
    verification.finish(Monitor())
    verification.close()
    assert load(path.read_bytes())["modified_ns"].tolist() == times


def write_verified(folder: Path, store: ShardedStore, times: list[int]) -> None:
    digest = np.frombuffer(bytes.fromhex(store.digest), np.uint8)
    columns = {"store_sha256": digest, "modified_ns": np.array(times)}
    write_columns(columns, folder / VERIFIED)


@pytest.mark.parametrize("name", ["weights.safetensors", "optimizer.safetensors"])
def test_a_flipped_byte_in_a_checkpoint_is_refused(name: str, tmp_path: Path) -> None:
    target = orthogonal_parts()
    store = ListStore([toy_answer(target, i) for i in range(10)])
    trained(tmp_path, store, target, steps=2)
    path = tmp_path / "checkpoints/step-0000002" / name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match="the checkpoint is damaged: expected SHA-256") as error:
        trained(tmp_path, store, target, steps=2)
    assert error.value.where == str(path)
    assert error.value.do.startswith(f"remove {path.parent}: training then resumes")
