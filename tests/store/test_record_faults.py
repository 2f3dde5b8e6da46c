"""Recording with faults: states that are not finite, full disks, several processes, kills."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draftlab.errors import UserError
from draftlab.progress import Monitor
from draftlab.store import resume as resume_module
from draftlab.store import shard_writer
from draftlab.store.manifest import MANIFEST, Manifest
from draftlab.store.record import RecordSettings, open_recorder, record
from draftlab.store.recording_plan import plan_recording
from draftlab.store.resume import Receipts
from draftlab.store.sample_table import Sample
from draftlab.store.store import Store
from draftlab.target_model.model import Target
from tests.helpers.monitors import RecordingMonitor
from tests.helpers.recordings import (
    exit_codes,
    file_hashes,
    fork_recorder,
    identity_of,
    make_samples,
    record_store,
)

SETTINGS = RecordSettings(dtype="float32", shard_tokens=100, batch_tokens=96)
FIELDS = {"bytes": 1, "sha256": "0" * 64}


def planned_receipts(target: Target, folder: Path) -> Receipts:
    """Plan a recording of `make_samples()` into a folder."""
    arguments = (target, make_samples(), SETTINGS, identity_of(target))
    return Receipts(folder, plan_recording(*arguments, monitor=Monitor())[0])


@contextmanager
def replaced_states(target: Target, layer: int, value: float, token: int) -> Iterator[None]:
    """Put a value into the state entering `layer` at the positions of `token`."""
    ids: list[torch.Tensor] = []
    embeddings = target.model.get_input_embeddings()

    def replace_states(_module: object, args: tuple) -> tuple:
        states = args[0].clone()
        states[ids[-1] == token] = value
        return (states, *args[1:])

    assert target.padding_reason is None  # computed before the states are replaced
    hooks = (
        embeddings.register_forward_pre_hook(lambda _, args: ids.append(args[0])),
        target.layers[layer].register_forward_pre_hook(replace_states),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def samples_with_token(token: int, *numbers: int) -> list[Sample]:
    """Make samples of which those with these numbers have `token`, at position 5 only."""
    samples = []
    for number, sample in enumerate(make_samples()):
        ids = [i if i != token else 0 for i in sample.token_ids]
        if number in numbers:
            ids[5] = token
        samples.append(replace(sample, token_ids=tuple(ids)))
    return samples


@pytest.mark.parametrize(
    ("dtype", "layer", "value"),
    [
        ("float32", 2, float("inf")),
        ("float32", 2, float("nan")),
        ("fp8", 2, float("inf")),
        ("bfloat16", 3, 3.4e38),  # finite in float32, infinite in bfloat16
    ],
)
def test_states_that_are_not_finite_are_refused_by_sample_and_layer(
    target: Target, tmp_path: Path, dtype: str, layer: int, value: float
) -> None:
    with replaced_states(target, layer, value, 77), pytest.raises(UserError) as caught:
        record_store(target, tmp_path, samples_with_token(77, 4), dtype=dtype)
    assert f"boundary {layer}, position 5" in caught.value.what
    assert caught.value.where == "sample 'c4'"
    assert "target.dtype" in caught.value.do
    assert "leave this conversation out of the prompts" in caught.value.do
    with pytest.raises(UserError, match="same command again"):
        Store.open(tmp_path)


def test_logits_that_are_not_finite_are_refused(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The states before them are finite."""
    own = Target.logits

    def overflowing(self: Target, states: torch.Tensor) -> torch.Tensor:
        return own(self, states) * float("inf")

    monkeypatch.setattr(Target, "logits", overflowing)
    with pytest.raises(UserError, match="NaN or infinity at the logits, position"):
        record_store(target, tmp_path)


def test_the_disk_fills_up_within_a_shard(
    target: Target, tmp_path: Path, expected_hashes: dict[str, str]
) -> None:
    whole = record_store(target, tmp_path / "whole")
    folder = tmp_path / "full"
    sizes = [shard.bytes for shard in whole.manifest.shards]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (sum(sizes) // len(sizes) // 2, hard))
    try:
        with pytest.raises(UserError, match="could not be written") as caught:
            record_store(target, folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "shard-0" in caught.value.where
    assert "the same command goes on" in caught.value.do
    assert not [p.name for p in folder.iterdir() if p.name.endswith(".tmp")]
    record_store(target, folder)
    assert file_hashes(folder) == expected_hashes


def test_a_failed_writer_stops_the_target(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shard_writer, "write_tensors", fail)
    monitor = RecordingMonitor()
    with pytest.raises(UserError, match="No space left on device"):
        record_store(target, tmp_path, make_samples(200), monitor)
    _, done, total, _ = monitor.last_progress
    assert done < total / 2
    assert not [t for t in threading.enumerate() if t.name.startswith("shard")]


def test_an_interruption_leaves_no_thread_and_no_partial_shard(
    target: Target, tmp_path: Path, expected_hashes: dict[str, str]
) -> None:
    class InterruptingMonitor(Monitor):
        def progress(self, stage: str, done: float, total: float, detail: str = "") -> None:
            if done > total / 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record_store(target, tmp_path, monitor=InterruptingMonitor())
    assert not [t for t in threading.enumerate() if t.name.startswith("shard")]
    assert not list(tmp_path.glob(".*.tmp"))
    manifest = tmp_path / "manifest.json"
    inode = manifest.stat().st_ino
    with pytest.raises(KeyboardInterrupt):
        record_store(target, tmp_path, monitor=InterruptingMonitor())
    assert manifest.stat().st_ino == inode  # workers see that the recording goes on
    record_store(target, tmp_path)
    assert file_hashes(tmp_path) == expected_hashes


def other_process(target: Target, folder: Path, numbers: Sequence[int]) -> int:
    """Fork a process that records shards of the published plan, and return its id."""
    child = os.fork()
    if child:
        return child
    try:
        torch.set_num_threads(1)
        arguments = (make_samples(), folder, SETTINGS, identity_of(target), None)
        with ExitStack() as stack:
            recorder = open_recorder(target, *arguments, stack)
            for number in numbers:
                list(recorder.record(number))
        os._exit(0)
    except BaseException:
        os._exit(1)


def test_other_processes_write_the_same_bytes_and_lost_shards_are_recorded_again(
    target: Target, tmp_path: Path, expected_hashes: dict[str, str]
) -> None:
    calls: list[list[int]] = []

    def record_shards(numbers: Sequence[int]) -> Iterator[int]:
        calls.append(list(numbers))
        children = [other_process(target, tmp_path, numbers[half::2]) for half in range(2)]
        yield 100
        if len(calls) == 1:
            os.kill(children[1], signal.SIGKILL)
        exit_codes(*children)

    record_store(target, tmp_path, record_shards=record_shards)
    assert file_hashes(tmp_path) == expected_hashes
    assert len(calls) == 2
    assert set(calls[1]) == set(calls[0][1::2])


def test_a_writer_whose_plan_was_replaced_changes_no_shard(target: Target, tmp_path: Path) -> None:
    planned_receipts(target, tmp_path).publish()
    stack = ExitStack()
    recorder = open_recorder(
        target, make_samples(), tmp_path, SETTINGS, identity_of(target), None, stack
    )
    record_store(target, tmp_path)
    before = file_hashes(tmp_path)
    list(recorder.record(0))
    with pytest.raises(UserError, match="completed or replaced"):
        stack.close()
    assert file_hashes(tmp_path) == before


def test_a_receipt_that_the_leader_removes_is_no_error(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker may look for a receipt while the leader completes the store."""
    receipts = planned_receipts(target, tmp_path)
    first = receipts.plan.shards[0]
    receipts.commit(first, FIELDS)
    (tmp_path / first.file).write_bytes(b"a")
    assert 0 not in receipts.missing()
    (tmp_path / first.file).write_bytes(b"ab")
    assert 0 in receipts.missing(), "a file of another size"
    (tmp_path / first.file).write_bytes(b"a")
    read_fields = resume_module.read_fields

    def removed(path: Path, *arguments: object, **options: str) -> object:
        path.unlink()
        return read_fields(path, *arguments, **options)

    monkeypatch.setattr(resume_module, "read_fields", removed)
    assert 0 in receipts.missing()


def test_a_receipt_that_does_not_fit_is_refused(target: Target, tmp_path: Path) -> None:
    receipts = planned_receipts(target, tmp_path)
    first = receipts.plan.shards[0]
    receipts.commit(first, FIELDS)
    (tmp_path / first.file).write_bytes(b"a")
    path = receipts.receipt_path(first)
    path.write_text(path.read_text().replace("000", "xyz"))
    with pytest.raises(UserError, match="expected a shard's receipt") as caught:
        receipts.missing()
    assert caught.value.where == str(path)


def test_shards_of_a_former_plan_complete_no_store(target: Target, tmp_path: Path) -> None:
    """A worker of a recording that was removed may still write into the folder."""
    receipts = planned_receipts(target, tmp_path)
    receipts.publish()
    plan = receipts.plan
    for shard in plan.shards:
        receipts.commit(shard, FIELDS)
    former = plan.model_copy(update={"samples_sha256": "1" * 64})
    Receipts(tmp_path, former).commit(plan.shards[1], FIELDS)
    with pytest.raises(UserError, match="another process has written") as caught:
        receipts.complete()
    assert caught.value.where.endswith(plan.shards[1].file)
    assert not Manifest.read(tmp_path / MANIFEST).complete


def test_a_process_excludes_others(target: Target, tmp_path: Path) -> None:
    child = fork_recorder(target, tmp_path, 0.1)
    while not (tmp_path / "manifest.json").exists():
        time.sleep(0.01)
    with pytest.raises(UserError, match="another process is recording") as caught:
        record_store(target, tmp_path)
    assert "--ray" in caught.value.do
    assert exit_codes(child) == [0]


def test_the_number_of_shards_in_memory_is_limited(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    active, most = [], []
    original = shard_writer.ShardRecorder._commit

    def slow_commit(self, buffer: object) -> None:
        active.append(buffer)
        most.append(len(active))
        time.sleep(0.02)
        original(self, buffer)
        active.remove(buffer)

    monkeypatch.setattr(shard_writer.ShardRecorder, "_commit", slow_commit)
    record_store(target, tmp_path, make_samples(30))
    assert 1 < max(most) <= shard_writer.SHARDS_AT_ONCE
    Store.open(tmp_path).verify()


def test_a_call_is_made_while_the_last_shard_is_written(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called, original = threading.Event(), shard_writer.ShardRecorder._commit

    def commit(self, buffer: shard_writer.ShardBuffer) -> None:
        if buffer.shard.number == len(self.receipts.plan.shards) - 1:
            assert called.wait(20)
        original(self, buffer)

    monkeypatch.setattr(shard_writer.ShardRecorder, "_commit", commit)
    arguments = target, make_samples(), tmp_path, SETTINGS, identity_of(target)
    record(*arguments, monitor=Monitor(), while_writing=called.set).verify()
