"""Damaged files of a run are named and made again; nothing is trained on a damaged shard."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections import Counter
from pathlib import Path

import pytest

from draftlab import Report, files
from draftlab.errors import UserError
from draftlab.run.stages import STAGES
from draftlab.store import shard_files
from tests.helpers.monitors import RecordingMonitor
from tests.helpers.small_run import contents, error_of, pipeline


def flip_byte(path: Path, position: int = -2000) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0xFF
    path.write_bytes(data)


@pytest.mark.parametrize("keeps_time", [False, True])
@pytest.mark.parametrize("damage", ["all bytes", "one byte"])
def test_a_shard_of_the_right_size_and_wrong_bytes_is_named(
    folder: Path, damage: str, keeps_time: bool
) -> None:
    before = contents(Path("runs/small/head"))
    shutil.rmtree("runs/small/head")
    shutil.rmtree("runs/small/train")
    shard = Path("runs/small/store/shard-00001.safetensors")
    times = shard.stat()
    if damage == "all bytes":
        shard.write_bytes(b"\xff" * shard.stat().st_size)
    else:
        flip_byte(shard)
    if keeps_time:  # as a faulty disk does; the training hashes what it reads
        os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))
    error = error_of("head")
    unreadable = damage == "all bytes" and keeps_time
    assert ("corrupt" if unreadable else "the shard is damaged") in error.what
    assert shard.name in error.where
    assert "`draftlab record runs/small/recipe.yaml`" in error.do
    assert not list(Path("runs/small").glob("train/checkpoints/*"))
    shard.unlink()  # as the message says
    pipeline().make("store")
    pipeline().make("head")
    assert contents(Path("runs/small/head")) == before


@pytest.mark.parametrize(
    ("file", "stage"),
    [
        ("answers.jsonl", "answers"),
        ("head/model.safetensors", "head"),
        ("head/config.json", "head"),
        ("eval/report.json", "eval"),
        ("export/speculators/model.safetensors", "export"),
    ],
)
def test_a_damaged_file_is_made_again(folder: Path, file: str, stage: str) -> None:
    path = Path("runs/small") / file
    before = path.read_bytes()
    flip_byte(path, -200)
    monitor = RecordingMonitor()
    pipeline(monitor=monitor).make(stage)
    assert f"{stage}: damaged, made again ({file} has SHA-256" in monitor.text
    if stage == "eval":
        assert Report.read(path).rows
    else:
        assert path.read_bytes() == before
    assert pipeline().run.status(STAGES[stage]).state == "done"


def test_a_changed_shard_under_a_finished_run_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor = RecordingMonitor()
    shard = Path("runs/small/store/shard-00001.safetensors")
    flip_byte(shard)
    pipeline(monitor=monitor).make("export")
    assert "store: damaged, and not needed (shard-00001.safetensors: the shard is" in monitor.text
    error = error_of("store")
    assert error.where == str(shard)
    assert "remove this shard" in error.do
    flip_byte(shard)  # back again: the hash is compared once, and then the time is known
    assert pipeline().run.status(STAGES["store"]).state == "done"
    hashed: list[str] = []
    monkeypatch.setattr(shard_files, "known_sha256", lambda path: hashed.append(path.name))
    assert pipeline().run.status(STAGES["store"]).state == "done"
    assert hashed == []


GARBAGE = [b"", b"\x00\xff", b"{", b"[]", b"null", b"{}", b'{"inputs": 3, "key": 3}']


@pytest.mark.parametrize("stage", ["answers", "store", "head", "eval", "export"])
def test_what_is_said_of_a_stage_record_that_is_garbage_helps(folder: Path, stage: str) -> None:
    before = contents(Path("runs/small/head"))
    record = Path(f"runs/small/stages/{stage}.json")
    for data in GARBAGE:
        record.write_bytes(data)
        with pytest.raises(UserError) as caught:
            pipeline().make("eval", "export")
        assert caught.value.where == str(record)
        assert "remove the file: the stage then runs again" in caught.value.do
    record.unlink()
    pipeline().make("eval", "export")
    assert contents(Path("runs/small/head")) == before


def test_what_is_said_of_a_checkpoint_that_is_garbage_helps(folder: Path) -> None:
    before = contents(Path("runs/small/head"))
    shutil.rmtree("runs/small/head")
    *_, last = sorted(Path("runs/small/train/checkpoints").glob("step-*"))
    for data in GARBAGE:
        (last / "state.json").write_bytes(data)
        error = error_of("head")
        assert error.where == str(last / "state.json")
        assert f"remove {last}" in error.do
    shutil.rmtree(last)
    pipeline().make("head")
    assert contents(Path("runs/small/head")) == before


def test_a_damaged_manifest_is_refused_where_it_is_needed(folder: Path) -> None:
    path = Path("runs/small/store/manifest.json")
    fields = json.loads(path.read_text())
    path.write_text(json.dumps(fields | {"shards_sha256": "0" * 64}))
    monitor = RecordingMonitor()
    pipeline(monitor=monitor).make("head")
    assert "store: damaged, and not needed (store/manifest.json has SHA-256" in monitor.text
    error = error_of("store")
    assert "as it was written" in error.what
    assert "remove runs/small/store" in error.do


def test_a_damaged_table_of_shards_is_refused_where_it_is_needed(folder: Path) -> None:
    flip_byte(path := Path("runs/small/store/shards.safetensors"), -1)
    monitor = RecordingMonitor()
    pipeline(monitor=monitor).make("head")
    assert "store: damaged, and not needed (shards.safetensors: the table" in monitor.text
    error = error_of("store")
    assert error.where == str(path)
    assert "remove the store" in error.do


def test_a_resumed_training_hashes_changed_shards_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[str] = []
    original = files.sha256_file

    def count(path: Path) -> str:
        hashed.extend([path.name] * path.name.startswith("shard-"))
        return original(path)

    monkeypatch.setattr(files, "sha256_file", count)
    for _ in range(2):  # the files of a copied run are other ones, and are hashed
        hashed.clear()
        shutil.rmtree("runs/small/head")
        pipeline().make("head")
    assert hashed == []
    shard = Path("runs/small/store/shard-00001.safetensors")
    shard.write_bytes(shard.read_bytes())  # another time of the last change
    time.sleep(0.11)  # files that were changed a moment ago are hashed each time
    shutil.rmtree("runs/small/head")
    pipeline().make("head")
    assert hashed == [shard.name]


def test_a_finished_run_is_hashed_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The states of stages are decided before the lock and once more under it."""
    reads: Counter[str] = Counter()
    original = files.sha256_file

    def count(path: Path) -> str:
        reads[str(path).removeprefix("runs/small/")] += 1
        return original(path)

    time.sleep(0.11)  # files that were changed a moment ago are hashed each time
    monkeypatch.setattr(files, "sha256_file", count)
    pipeline().make("eval", "export")
    recorded = {
        name
        for record in Path("runs/small/stages").iterdir()
        for name in json.loads(record.read_text())["sha256"]
    }
    assert {"answers.jsonl", "store/manifest.json", "head/model.safetensors"} < recorded
    columns = {"store/records.safetensors", "store/shards.safetensors"}
    assert reads.keys() == recorded | {"prompts.jsonl"} | columns
    assert set(reads.values()) == {1}

    # A change that keeps size and mtime is noticed by the same process.
    weights = Path("runs/small/head/model.safetensors")
    times = weights.stat()
    flip_byte(weights)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    status = pipeline().run.status(STAGES["head"])
    assert status.damage.startswith("head/model.safetensors has SHA-256")
