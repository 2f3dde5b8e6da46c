"""A store that is a window, end to end: the bits of a full store, whatever happens meanwhile."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from draftlab.errors import UserError
from draftlab.progress import Monitor
from draftlab.store.manifest import MANIFEST, Manifest
from draftlab.store.resume import Receipts
from draftlab.store.shard_writer import ShardRecorder
from draftlab.store.store import Store
from draftlab.train.batch.window_order import WindowOrder
from draftlab.workers.pool import MAX_ATTEMPTS
from draftlab.workers.window import devices as window_training
from draftlab.workers.window import recorder as window_recorder
from draftlab.workers.window.recorder import (
    STATE,
    WindowFollower,
    WindowRecorder,
    WindowSession,
    wait_until_heard,
)
from draftlab.workers.window.shards import DamagedShardError
from tests.helpers.small_run import draftlab, new_workshop, ran, write_prompts
from tests.helpers.thread_pool import LostError, ThreadPool

WINDOW = 520_000
SETTINGS = (
    "record.shard_tokens=128",
    f"record.window={WINDOW}",
    "train.steps=30",
    "train.checkpoint_every=7",
)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a working directory whose run `full` was trained on a full store in windows."""
    folder = new_workshop(tmp_path_factory.mktemp("full"))
    write_prompts(folder / "prompts.jsonl", [f"def f{i}(use): the user {i}" for i in range(150)])
    result = ran(folder, "train", "small.yaml", "name=full", *SETTINGS, "record.keep=all")
    assert "75 shards, 15 of them with the held-out records" in result.output
    return folder


@pytest.fixture
def workshop(full: Path, tmp_path: Path) -> Path:
    """Return a working directory with the answers of `full` for a run `small`."""
    for name in ("toy", "prompts.jsonl", "small.yaml"):
        path = full / name
        (shutil.copytree if path.is_dir() else shutil.copy)(path, tmp_path / name)
    run = tmp_path / "runs/small"
    (run / "stages").mkdir(parents=True)
    for path in (full / "runs/full").glob("answers*"):
        (shutil.copytree if path.is_dir() else shutil.copy)(path, run / path.name)
    shutil.copy(full / "runs/full/stages/answers.json", run / "stages")
    return tmp_path


def bytes_of(folder: Path, run: str) -> dict[str, bytes]:
    """Return the bytes of a run's head."""
    return {path.name: path.read_bytes() for path in (folder / "runs" / run / "head").iterdir()}


def use_threads(monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    """Have threads record, with faults."""
    monkeypatch.setattr(window_training, "LocalPool", partial(ThreadPool, **options))


def train_as(full: Path, workshop: Path) -> str:
    """Train in a working directory to the head of `full`; return what was printed."""
    result = ran(workshop, "train", "small.yaml", *SETTINGS)
    assert bytes_of(workshop, "small") == bytes_of(full, "full")
    return str(result.output)


@contextmanager
def watched(store: Path) -> Iterator[list[int]]:
    """Yield the bytes of the shards that come and go, and of those being written, over time."""
    seen, ended = [0], threading.Event()

    def watch() -> None:
        num_kept = 0
        while not ended.is_set():
            if not num_kept and (store / MANIFEST).is_file():
                plan = Manifest.read(store / MANIFEST)
                window = plan.window if plan.complete else None
                num_kept = window.validation_shards if window else 0
            sizes = []
            for path in store.glob("*shard-*") if num_kept else ():
                try:
                    number = int(path.name.split("shard-")[1][:5])
                    sizes.append(path.stat().st_size if number >= num_kept else 0)
                except OSError:
                    pass  # it has gone meanwhile
            seen.append(sum(sizes))
            time.sleep(0.001)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()


def clear_before_a_writer(
    recorder: WindowRecorder, clear: Callable[[WindowRecorder], None] = WindowRecorder.clear
) -> None:
    """Clear a window while a worker on another machine still writes a shard."""
    receipts, nothing = Receipts.from_published(recorder.store.folder), cast(Any, None)
    late = ShardRecorder(nothing, nothing, receipts)
    buffer: Any = SimpleNamespace(
        shard=receipts.plan.shards[-1], tensors={"tokens": torch.zeros(1)}, fp8_errors=[]
    )
    clear(recorder)
    with pytest.raises(UserError, match="another process has completed or replaced it"):
        late._commit(buffer)


def test_a_window_gives_the_bits_of_a_full_store(
    full: Path, workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_threads(monkeypatch)
    store = workshop / "runs/small/store"
    monkeypatch.setattr(WindowRecorder, "clear", clear_before_a_writer)
    with watched(store) as seen:
        result = draftlab(workshop, "train", "small.yaml", *SETTINGS)
    assert result.exit_code == 0, result.output
    assert bytes_of(workshop, "small") == bytes_of(full, "full")
    assert "a window of 520 kB: training records the others, and deletes them" in result.output
    assert "window: the training waited for shards " in result.output
    assert "the recording waited for room " in result.output
    assert WINDOW / 2 < max(seen) <= WINDOW + 2 * 40_000
    plan = Manifest.read(store / MANIFEST)
    num_kept = plan.window.validation_shards
    kept = sorted(path.name for path in store.glob("shard-*"))
    assert kept == [shard.file for shard in plan.shards[:num_kept]]
    assert not (store / kept[0]).samefile(full / "runs/full/store" / kept[0])
    rows = [json.loads(s) for s in (workshop / "runs/small/train/metrics.jsonl").open()]
    assert any("window" in row.get("phases", {}) for row in rows)
    assert any("recording_waited" in row for row in rows)
    with pytest.raises(UserError, match="this store is a window: its shards come and go"):
        Store.open(store)
    whole = Store.open(full / "runs/full/store")
    hashes = {s.file: s.sha256 for s in whole.manifest.shards}
    recorded = [json.loads(line) for line in (store / "recorded.jsonl").open()]
    assert len(recorded) > 40
    assert all(hashes[entry["file"]] == entry["sha256"] for entry in recorded)
    again = draftlab(workshop, "train", "small.yaml", *SETTINGS)
    assert "head: there" in again.output
    other = draftlab(workshop, "train", "small.yaml", *SETTINGS, "train.validation_share=0.1")
    assert "the stage 'store' of the run has other settings" in other.output


def test_an_error_of_the_recording_ends_the_training(
    full: Path, workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_threads(monkeypatch, faults={50: UserError("the GPU burns", do="quench it")})
    result = ran(workshop, "train", "small.yaml", *SETTINGS, code=2)
    assert "the GPU burns" in result.output
    assert "quench it" in result.output
    assert not [t for t in threading.enumerate() if t.name in ("window", "thread 1_0")]
    use_threads(monkeypatch)
    assert "resuming training after step" in train_as(full, workshop)


def test_the_shards_of_a_lost_worker_are_recorded_by_another(
    full: Path, workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_threads(monkeypatch, faults={9: LostError("killed"), 40: LostError("killed")})
    assert train_as(full, workshop).count("its work is done by others") == 2


def test_answers_of_a_worker_may_arrive_together(
    full: Path, workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later answer of a worker names the shards that earlier calls computed."""
    use_threads(monkeypatch, num_workers=1)
    plain = window_recorder.wait
    monkeypatch.setattr(window_recorder, "wait", lambda futures, *_: plain(futures, 2.0))
    train_as(full, workshop)


def test_an_error_of_the_training_ends_the_recording(
    workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_threads(monkeypatch)

    def fail(*_: Any, **__: Any) -> None:
        raise UserError("no convergence")

    monkeypatch.setattr("draftlab.train.loop.Trainer._log", fail)
    result = ran(workshop, "train", "small.yaml", *SETTINGS, code=2)
    assert "no convergence" in result.output
    assert not [t for t in threading.enumerate() if t.name == "window"]


def test_shards_that_are_damaged_after_they_were_written_are_recorded_again(
    full: Path, workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_threads(monkeypatch)
    from draftlab.workers.window.shards import WindowShards

    plain, damaged = WindowShards.read, []

    def damage(self: WindowShards, number: int) -> Any:
        if len(damaged) < 2:
            damaged.append(number)
            path = self.folder / self.plan.shards[number].file
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
        return plain(self, number)

    monkeypatch.setattr(WindowShards, "read", damage)
    assert train_as(full, workshop).count("it is recorded again") == 2


@pytest.mark.slow
def test_a_training_of_many_windows_never_exceeds_its_window(
    full: Path, workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes record; the whole data are three windows."""
    plan = Manifest.read(full / "runs/full/store" / MANIFEST)
    order = WindowOrder(plan, 0)
    per_window = WINDOW * order.tokens.sum() / order.sizes.sum()
    steps = round(12 * per_window / order.tokens.sum() * rows_of_an_epoch(plan, order) / 2) + 1
    settings = (*SETTINGS, f"train.steps={steps}", "train.checkpoint_every=100")
    with monkeypatch.context() as patch:  # any way to record gives the same bytes
        use_threads(patch)
        ran(full, "train", "small.yaml", "name=long", *settings, "record.keep=all")
    monkeypatch.setenv(window_training.RECORDERS, "2")
    with watched(workshop / "runs/small/store") as seen:
        result = draftlab(workshop, "train", "small.yaml", *settings)
    assert result.exit_code == 0, result.output
    trained = json.loads((workshop / "runs/small/head/draftlab.json").read_text())
    assert trained["provenance"]["tokens_seen"] >= 12 * per_window
    assert max(seen) <= WINDOW + 2 * int(order.sizes.max()), max(seen)
    assert bytes_of(workshop, "small") == bytes_of(full, "long")


def rows_of_an_epoch(plan: Manifest, order: WindowOrder) -> int:
    """Return how many rows of 128 tokens the first epoch has."""
    lengths = plan.index.lengths
    steps, groups = order.steps(lengths, 128, 1), len(order.epoch(0))
    return sum(1 for _ in takewhile(lambda step: step.group < groups, steps))


def new_session(**pool: Any) -> WindowSession:
    shards: Any = SimpleNamespace(
        plan=SimpleNamespace(shards=[SimpleNamespace(file="shard-00000.safetensors")]),
        folder=Path("store"),
        add_verified=lambda *_, **__: None,
        delete_files=lambda _: None,
    )
    workers: Any = SimpleNamespace(workers=[], start_workers=lambda _: None, **pool)
    nothing: Any = None
    return WindowSession(shards, [], 0, workers, nothing, Monitor())


def verify(session: WindowSession, error: Exception | None) -> None:
    future: Future[Any] = Future()
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
    session.verifying[future] = 0, True
    session._collect_verified(future)


def test_a_shard_that_is_damaged_several_times_in_a_row_ends_the_run() -> None:
    one = new_session()
    for _ in range(MAX_ATTEMPTS - 1):
        verify(one, DamagedShardError("other bytes"))
    with pytest.raises(UserError, match="damaged 3 times in a row"):
        verify(one, DamagedShardError("other bytes"))


def test_a_shard_that_is_damaged_once_in_each_of_many_epochs_does_not() -> None:
    one = new_session()
    for _ in range(2 * MAX_ATTEMPTS):
        verify(one, DamagedShardError("other bytes"))
        verify(one, None)
    assert len(one.tasks.waiting) == 2 * MAX_ATTEMPTS


def test_a_shard_whose_call_was_cancelled_with_its_worker_is_given_to_others() -> None:
    """`concurrent.futures.wait` does not return a call that was cancelled before it began."""
    one, call, worker = new_session(), Future[Any](), cast(Any, object())
    one.tasks.running[call] = worker, 0
    one.written[1] = worker
    call.cancel()
    one.step(0)
    assert sorted(one.tasks.waiting) == [0, 1]
    assert one.tasks.running == one.written == {}


def test_what_waits_to_be_verified_is_left_when_the_training_ends() -> None:
    one, future = new_session(), Future[Any]()
    one.verifying[future] = 0, True
    one.cancel()
    assert future.cancelled()


def test_other_ranks_wait_for_the_groups_and_get_the_error() -> None:
    shared = dist.HashStore()
    shared.set(STATE, json.dumps([1, None]))
    follower = WindowFollower(shared)
    assert not follower.wait(0)
    shared.set(STATE, json.dumps([1, {"what": "the GPU burns", "where": "", "do": "quench it"}]))
    rank_0 = threading.Thread(target=wait_until_heard, args=(shared,))
    rank_0.start()
    rank_0.join(0.5)
    assert rank_0.is_alive(), "the error would end with it"
    with pytest.raises(UserError, match="the GPU burns"):
        follower.wait(1)
    rank_0.join(5)
    assert not rank_0.is_alive()
