"""Recordings that were interrupted or damaged are continued to the same bytes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from draftlab.errors import UserError
from draftlab.store.store import Store
from draftlab.target_model.model import Target
from tests.helpers.monitors import RecordingMonitor
from tests.helpers.recordings import (
    exit_codes,
    file_hashes,
    fork_recorder,
    make_samples,
    record_store,
    recorded_shapes,
)


def test_continuing_with_something_else_is_refused(target: Target, tmp_path: Path) -> None:
    samples = make_samples()
    record_store(target, tmp_path, samples)
    before = file_hashes(tmp_path)
    other_temperature = [*samples[:-1], replace(samples[-1], temperature=0.7)]
    for other_samples, settings, words in (
        (samples, {"shard_tokens": 50}, "shard_tokens: expected 50, found 100"),
        (samples, {"dtype": "bfloat16"}, "dtype: expected bfloat16, found float32"),
        (samples[:-1], {}, "expected 11 records, found 12"),
        (samples[1:] + samples[:1], {}, "record 0: expected 'c1'"),
        (other_temperature, {}, "the same ids and lengths, but other"),
    ):
        with pytest.raises(UserError, match=words):
            record_store(target, tmp_path, other_samples, **settings)
    assert file_hashes(tmp_path) == before


@pytest.mark.parametrize("dtype", ["float32", "fp8"])
def test_missing_and_truncated_shards_are_recorded_again(
    target: Target, tmp_path: Path, dtype: str
) -> None:
    record_store(target, tmp_path, dtype=dtype)
    before = file_hashes(tmp_path)
    (tmp_path / "shard-00001.safetensors").unlink()
    os.truncate(tmp_path / "shard-00002.safetensors", 100)
    # A process was killed while it wrote the receipt of a good shard.
    (tmp_path / ".shard-00000.json.6285.tmp").write_text('{"plan"')
    with pytest.raises(UserError, match="shard-00001"):
        Store.open(tmp_path)
    monitor = RecordingMonitor()
    store = record_store(target, tmp_path, monitor=monitor, dtype=dtype)
    assert file_hashes(tmp_path) == before
    assert monitor.text.count("recorded again") == 2
    assert bool(store.manifest.shards[0].fp8_errors) == (dtype == "fp8")


def test_a_recording_is_continued_with_the_batches_of_its_plan(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A padded plan, as of older stores, is followed; a packed one needs a target that packs."""
    assert target.padding_reason is None
    for name, reason in (("padded", "mixes them"), ("packed", None)):
        monkeypatch.setitem(target.__dict__, "padding_reason", reason)
        record_store(target, tmp_path / name)
    before = file_hashes(tmp_path / "padded")
    (tmp_path / "padded/shard-00001.safetensors").unlink()
    with recorded_shapes(target) as shapes:
        record_store(target, tmp_path / "padded")
    assert file_hashes(tmp_path / "padded") == before
    assert max(rows for rows, _ in shapes) > 1

    monkeypatch.setitem(target.__dict__, "padding_reason", "mixes them")
    record_store(target, tmp_path / "packed")  # complete: no pass is needed
    (tmp_path / "packed/shard-00001.safetensors").unlink()
    with pytest.raises(UserError, match=r"conversations side by side.*mixes them"):
        record_store(target, tmp_path / "packed")


def test_a_complete_store_is_not_touched(target: Target, tmp_path: Path) -> None:
    record_store(target, tmp_path)
    before = {p.name: p.stat().st_mtime_ns for p in tmp_path.iterdir()}
    (tmp_path / "shard-00000.json").write_text("{}")  # killed while it removed the receipts
    monitor = RecordingMonitor()
    record_store(target, tmp_path, monitor=monitor)
    assert monitor.last_progress == ()
    assert {p.name: p.stat().st_mtime_ns for p in tmp_path.iterdir()} == before


def test_receipts_of_another_plan_are_ignored(target: Target, tmp_path: Path) -> None:
    record_store(target, tmp_path / "clean", make_samples(seed=1))
    record_store(target, tmp_path / "reused", make_samples(seed=0))
    for shard in sorted((tmp_path / "reused").glob("*.safetensors")):
        receipt = {"plan": "other", "bytes": shard.stat().st_size, "sha256": "0"}
        shard.with_suffix(".json").write_text(json.dumps(receipt))
    (tmp_path / "reused/manifest.json").unlink()
    record_store(target, tmp_path / "reused", make_samples(seed=1)).verify()
    clean, reused = (file_hashes(tmp_path / name) for name in ("clean", "reused"))
    assert {name: reused[name] for name in clean} == clean


# A process that loads the target once and forks a recorder for every step to be killed at. It does
# not spawn them, because importing transformers thirty times would take minutes.
_KILL_AT_EVERY_STEP = """
import json, os, shutil, signal, sys, threading
from pathlib import Path
import torch
torch.set_num_threads(1)
sys.path.insert(0, {root!r})
from tests.helpers.recordings import file_hashes, record_store
from draftlab.store import shard_writer
from draftlab.target_model.loading import load_target
from draftlab.target_model.settings import TargetSettings

work, target = Path({work!r}), load_target(TargetSettings(path={target!r}, device="cpu"))

def recorder_status(folder, kill_at):
    '''Fork a recorder that SIGKILLs itself at its kill_at-th step towards the disk.'''
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    count, lock = 0, threading.Lock()
    def counted(original, before_kill=None):
        def step(*args, **kwargs):
            nonlocal count
            with lock:  # shards are written by threads
                count += 1
                number = count
            if number == kill_at:
                if before_kill:
                    before_kill(*args)
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)
        return step
    write_tensors = shard_writer.write_tensors
    def write_half(tensors, path):
        write_tensors(tensors, path)
        os.truncate(path, os.path.getsize(path) // 2)
    shard_writer.write_tensors = counted(write_tensors, write_half)
    os.fsync, os.replace, os.unlink = map(counted, (os.fsync, os.replace, os.unlink))
    try:
        record_store(target, folder)
        os._exit(0)
    except BaseException as error:
        print(repr(error), file=sys.stderr)
        os._exit(1)

assert recorder_status(work / "whole", 0) == 0
expected = file_hashes(work / "whole")
killed, states = 0, set()
for kill_at in range(1, 200):
    folder = work / f"at{{kill_at}}"
    status = recorder_status(folder, kill_at)
    if status == 0:
        break
    assert os.WTERMSIG(status) == signal.SIGKILL, status
    killed += 1
    states.add(tuple(sorted(p.name.split(".safetensors.")[0] for p in folder.iterdir())))
    if kill_at % 4 == 0:
        recorder_status(folder, 4)  # killed again while it resumes
    assert recorder_status(folder, 0) == 0
    hashes = file_hashes(folder)
    assert hashes == expected, (kill_at, set(expected.items()) ^ set(hashes.items()))
    shutil.rmtree(folder)
print(json.dumps({{"killed": killed, "states": len(states), "files": sorted(expected)}}))
"""


def test_killed_at_every_step_a_recording_resumes_to_the_same_bytes(
    target: Target, tmp_path: Path
) -> None:
    script = _KILL_AT_EVERY_STEP.format(
        root=str(Path(__file__).parents[2]), work=str(tmp_path), target=str(target.folder)
    )
    process = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=1800,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert process.returncode == 0, process.stderr[-3000:]
    result = json.loads(process.stdout.splitlines()[-1])
    shards = [name for name in result["files"] if name.endswith(".safetensors")]
    assert result["files"] == [".lock", "manifest.json", *shards]
    # For each shard: half its file, fsync, replace, fsync of the folder, the same for its receipt,
    # unlink; and the manifest twice.
    assert len(shards) > 2
    assert result["killed"] >= 6 + 8 * len(shards)
    assert result["states"] > 3 * len(shards)


def test_killed_from_outside_it_keeps_committed_shards(
    target: Target, tmp_path: Path, expected_hashes: dict[str, str]
) -> None:
    child = fork_recorder(target, tmp_path, pause=0.05)
    deadline = time.monotonic() + 30
    while not (tmp_path / "shard-00001.safetensors").exists() and time.monotonic() < deadline:
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    assert exit_codes(child) == [-signal.SIGKILL]
    assert not json.loads((tmp_path / "manifest.json").read_text())["complete"]
    with pytest.raises(UserError, match="interrupted"):
        Store.open(tmp_path)
    written = (tmp_path / "shard-00000.safetensors").stat().st_mtime_ns
    monitor = RecordingMonitor()
    record_store(target, tmp_path, monitor=monitor)
    assert (tmp_path / "shard-00000.safetensors").stat().st_mtime_ns == written
    assert "of them there already" in monitor.text
    assert file_hashes(tmp_path) == expected_hashes
