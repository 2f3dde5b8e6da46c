"""Recording when something breaks: states, the disk, other processes, deaths at random."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draftlab.errors import UserError
from draftlab.progress import Monitor
from draftlab.store import shard_writer
from draftlab.store.receipts import Receipts
from draftlab.store.record import RecordSettings, planned, record
from draftlab.store.store import Sample, Store
from draftlab.target_model.model import Target, TargetSettings, load_target
from draftlab.train.batch.loss_rows import loss_reach
from tests.helpers.recordings import Lines, contents, identity_of, make, make_samples
from tests.helpers.toys import toy_target_folder


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp("target")
    toy_target_folder(folder, layers=4, hidden=32, max_length=64)
    return load_target(TargetSettings(path=str(folder), device="cpu"))


@contextmanager
def poisoned(target: Target, layer: int, value: float, token: int) -> Iterator[None]:
    """Puts a value into the state entering `layer` wherever the pass reads `token`."""
    seen: list[torch.Tensor] = []
    embeddings = target.model.get_input_embeddings()

    def spoil(_module: object, args: tuple) -> tuple:
        states = args[0].clone()
        states[seen[-1] == token] = value
        return (states, *args[1:])

    hooks = (
        embeddings.register_forward_pre_hook(lambda _, args: seen.append(args[0])),
        target.layers[layer].register_forward_pre_hook(spoil),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def with_token(token: int, *numbers: int) -> list[Sample]:
    """Samples of which those of these numbers hold `token` at position 5, and no others at all."""
    found = []
    for number, sample in enumerate(make_samples()):
        ids = [i if i != token else 0 for i in sample.token_ids]
        if number in numbers:
            ids[5] = token
        found.append(replace(sample, token_ids=tuple(ids)))
    return found


@pytest.mark.parametrize("dtype", ["float32", "fp8"])
def test_not_finite_is_refused_by_sample_and_layer(
    target: Target, tmp_path: Path, dtype: str
) -> None:
    with poisoned(target, 2, float("inf"), 77), pytest.raises(UserError) as caught:
        make(target, tmp_path, with_token(77, 4), dtype=dtype)
    assert "boundary 2, position 5" in caught.value.what
    assert caught.value.where == "sample 'c4'"
    assert "not_finite: skip" in caught.value.do


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8"])
def test_not_finite_is_skipped_and_counted(target: Target, tmp_path: Path, dtype: str) -> None:
    samples = with_token(77, 4, 9)
    monitor = Lines()
    clean = make(target, tmp_path / "clean", samples, dtype=dtype)
    with poisoned(target, 3, float("nan"), 77):
        store = make(target, tmp_path / "store", samples, monitor, dtype=dtype, not_finite="skip")
    assert any("skipped sample 'c4': NaN or infinity at boundary 3" in s for s in monitor.lines)
    assert any("2 of 12 samples skipped" in line for line in monitor.lines)
    assert store.ids == clean.ids
    for kept, found in zip(clean, store, strict=True):
        assert torch.equal(kept.tokens, found.tokens)
        if found.id in ("c4", "c9"):
            assert int(loss_reach(found.spans).sum()) == 0
            assert not found.features.any()
            assert not found.last.any()
        else:
            assert torch.equal(kept.spans, found.spans)
            assert torch.equal(kept.features, found.features)
    with pytest.raises(UserError, match="not_finite: expected refuse, found skip"):
        make(target, tmp_path / "store", samples, dtype=dtype)


def test_bfloat16_overflow_is_seen_as_stored(target: Target, tmp_path: Path) -> None:
    """3.4e38 is finite in float32 and infinite in bfloat16."""
    with (
        poisoned(target, 3, 3.4e38, 77),
        pytest.raises(UserError, match="boundary 3, position 5"),
    ):
        make(target, tmp_path, with_token(77, 0), dtype="bfloat16")


def test_the_disk_fills_up_within_a_shard(target: Target, tmp_path: Path) -> None:
    make(target, tmp_path / "whole")
    folder = tmp_path / "full"
    sizes = [p.stat().st_size for p in (tmp_path / "whole").glob("*.safetensors")]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (sum(sizes) // len(sizes) // 2, hard))
    try:
        with pytest.raises(UserError, match="could not be written") as caught:
            make(target, folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "shard-0" in caught.value.where
    assert "the same command goes on" in caught.value.do
    assert not [p.name for p in folder.iterdir() if p.name.endswith(".tmp")]
    make(target, folder)
    assert contents(folder) == contents(tmp_path / "whole")


def test_a_writer_that_fails_stops_the_target(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shard_writer, "save_file", fail)
    monitor = Lines()
    with pytest.raises(UserError, match="No space left on device"):
        make(target, tmp_path, make_samples(200), monitor)
    total = monitor.steps[-1][1]
    assert monitor.steps[-1][0] < total / 2
    assert not [t for t in threading.enumerate() if t.name.startswith("shard")]


def test_an_interruption_leaves_no_thread_and_no_half_shard(target: Target, tmp_path: Path) -> None:
    class Impatient(Monitor):
        def progress(self, stage: str, done: float, total: float, detail: str = "") -> None:
            if done > total / 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(target, tmp_path / "cut", monitor=Impatient())
    assert not [t for t in threading.enumerate() if t.name.startswith("shard")]
    assert not list((tmp_path / "cut").glob(".*.tmp"))
    manifest = tmp_path / "cut/manifest.json"
    plan = manifest.stat().st_ino
    with pytest.raises(KeyboardInterrupt):
        make(target, tmp_path / "cut", monitor=Impatient())
    assert manifest.stat().st_ino == plan  # by which helpers know that it is not over
    make(target, tmp_path / "whole")
    make(target, tmp_path / "cut")
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def fork(target: Target, folder: Path, part: str, pause: float = 0.0) -> int:
    """A process that records its part, pausing after every batch."""

    class Slow(Monitor):
        def progress(self, *_: object) -> None:
            time.sleep(pause)

    child = os.fork()
    if child:
        return child
    try:
        torch.set_num_threads(1)
        settings = RecordSettings(dtype="float32", shard_tokens=100, batch_tokens=96)
        identity = identity_of(target)
        record(target, make_samples(), folder, settings, identity, monitor=Slow(), part=part)
        os._exit(0)
    except BaseException:
        os._exit(1)


def wait(*children: int) -> list[int]:
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def test_processes_share_a_plan_and_write_the_same_bytes(target: Target, tmp_path: Path) -> None:
    make(target, tmp_path / "whole")
    folder = tmp_path / "shared"
    # Helpers come first: they wait for the plan.
    helpers = [fork(target, folder, "help", 0.05) for _ in range(2)]
    time.sleep(0.2)
    assert wait(fork(target, folder, "lead", 0.05), *helpers) == [0, 0, 0]
    assert contents(folder) == contents(tmp_path / "whole")


def test_a_helper_that_comes_too_late_leaves_no_claim(target: Target, tmp_path: Path) -> None:
    """Between its look at the receipts and its claim another process completes the store."""
    settings = RecordSettings(dtype="float32", shard_tokens=100, batch_tokens=96)
    plan, _ = planned(target, make_samples(), settings, identity_of(target), monitor=Monitor())
    Receipts(tmp_path, plan).publish()
    late = Receipts.of_published(tmp_path)
    assert late is not None
    make(target, tmp_path)
    whole = contents(tmp_path)
    assert late.take(plan.shards[0], wait=False) is None
    assert contents(tmp_path) == whole


def test_a_helper_dies_and_another_number_finishes(target: Target, tmp_path: Path) -> None:
    make(target, tmp_path / "whole")
    folder = tmp_path / "shared"
    lead, helper = fork(target, folder, "lead", 0.15), fork(target, folder, "help", 0.15)
    deadline = time.monotonic() + 30
    while not list(folder.glob("shard-*.json")) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(helper, signal.SIGKILL)
    assert wait(helper, lead) == [-signal.SIGKILL, 0]
    assert contents(folder) == contents(tmp_path / "whole")

    (folder / "shard-00001.safetensors").unlink()
    (folder / "shard-00000.safetensors").unlink()
    lead = fork(target, folder, "lead", 0.15)
    time.sleep(0.05)
    os.kill(lead, signal.SIGKILL)
    wait(lead)
    helpers = [fork(target, folder, "help") for _ in range(3)]
    assert wait(*helpers) == [0, 0, 0]
    assert wait(fork(target, folder, "lead")) == [0]
    assert contents(folder) == contents(tmp_path / "whole")


def test_killed_while_it_adopts_a_store_that_lost_a_shard(target: Target, tmp_path: Path) -> None:
    """It writes receipts of the good shards, which nobody takes again."""
    make(target, tmp_path / "whole")
    folder = tmp_path / "killed"
    make(target, folder)
    (folder / "shard-00000.safetensors").unlink()
    (folder / ".shard-00002.json.6285.tmp").write_text('{"plan"')
    make(target, folder)
    assert contents(folder) == contents(tmp_path / "whole")


def test_who_shares_and_who_does_not_exclude_each_other(target: Target, tmp_path: Path) -> None:
    lead = fork(target, tmp_path, "lead", 0.1)
    while not (tmp_path / "manifest.json").exists():
        time.sleep(0.01)
    with pytest.raises(UserError, match="another process is recording") as caught:
        make(target, tmp_path)
    assert "--join" in caught.value.do
    assert wait(lead) == [0]


def test_a_helper_with_other_samples_is_refused(target: Target, tmp_path: Path) -> None:
    make(target, tmp_path)
    fields = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps(fields | {"complete": False}))
    settings = RecordSettings(dtype="float32", shard_tokens=100, batch_tokens=96)
    arguments = (tmp_path, settings, identity_of(target))
    with pytest.raises(UserError, match="other samples"):
        record(target, make_samples(11), *arguments, monitor=Monitor(), part="help")


def test_killed_at_random_moments_by_the_clock(target: Target, tmp_path: Path) -> None:
    """Unlike the deaths at every step towards the disk, these hit the target and the threads."""
    make(target, tmp_path / "whole")
    generator = random.Random(8)
    folder = tmp_path / "killed"
    for _ in range(6):
        child = fork(target, folder, "alone", 0.01)
        time.sleep(generator.uniform(0.0, 0.15))
        os.kill(child, signal.SIGKILL)
        wait(child)
    assert wait(fork(target, folder, "alone")) == [0]
    assert contents(folder) == contents(tmp_path / "whole")


def test_no_more_shards_at_once_than_said(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive, most = 0, 0
    lock, original = threading.Lock(), shard_writer.ShardWriters._commit

    def slow(self, *arguments: object) -> int:
        nonlocal alive, most
        with lock:
            alive += 1
            most = max(most, alive)
        time.sleep(0.02)
        try:
            return original(self, *arguments)
        finally:
            with lock:
                alive -= 1

    monkeypatch.setattr(shard_writer.ShardWriters, "_commit", slow)
    make(target, tmp_path, make_samples(30))
    assert 1 < most <= shard_writer.SHARDS_AT_ONCE
    Store.open(tmp_path).verify()
