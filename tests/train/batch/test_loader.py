"""Batches reach training in order, with equal bits for any number of data workers, and errors too.

Data workers take seconds to start: the tests that start them are few.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import closing, suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch

from draftlab.errors import UserError
from draftlab.signals import ENDING_SIGNALS
from draftlab.target_model.model import Target
from draftlab.train.batch.fixed_sizes import FixedSizes
from draftlab.train.batch.loader import BatchLoader, MicroBatch, prefetch
from draftlab.train.batch.loss_rows import BLOCK_SAMPLING, DEPTH_SAMPLING
from draftlab.train.batch.packing import Batch, OptimizerStep, Packer, map_tensors
from draftlab.train.distributed.ranks import Ranks
from draftlab.train.loop import Trainer
from draftlab.train.settings import TrainSettings
from tests.helpers.list_store import OddStore, SlowStore
from tests.helpers.recordings import make_samples, record_store, small_target
from tests.helpers.toy_training import (
    all_tensors,
    assert_same_batches,
    orthogonal_parts,
    packer,
    step,
    toy_store,
    trained,
)

CPU = Ranks(0, 1, torch.device("cpu"))
GPU = Ranks(0, 1, torch.device("cuda"))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return small_target(tmp_path_factory.mktemp("target"))


def load(made: Packer, steps: list[OptimizerStep], ranks: Ranks = CPU) -> list[MicroBatch]:
    """Load the micro-batches of steps; no worker or thread is left behind."""
    with closing(BatchLoader(made, ranks).micro_batches(iter(steps))) as micro_batches:
        loaded = list(micro_batches)
    assert_nothing_left()
    return loaded


def packed_here(made: Packer, steps: list[OptimizerStep]) -> list[Batch]:
    return [batch.dequantised() for each in steps for batch in made[each]]


def workers(parent: int) -> list[int]:
    """Return the data workers of a process that still run."""
    running = []
    for folder in (path for path in Path("/proc").iterdir() if path.name.isdigit()):
        with suppress(OSError):
            state, ppid = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            is_worker = "batch.workers" in (folder / "cmdline").read_text()
            if int(ppid) == parent and is_worker and state != "Z":
                running.append(int(folder.name))
    return running


def assert_nothing_left() -> None:
    assert not [t.name for t in threading.enumerate() if t.name.startswith(("prefetch", "pack"))]
    assert not workers(os.getpid())
    assert "draftlab-batches" not in Path("/proc/self/maps").read_text()


def test_prefetch_keeps_the_order_and_prepares_one_item() -> None:
    started: list[int] = []
    items = prefetch(started.append(n) or n for n in range(40))
    assert [next(items) for _ in range(9)] == [*range(9)]
    items.close()
    assert len(started) <= 11
    assert_nothing_left()


def test_the_micro_batches_of_a_step_share_its_counts() -> None:
    batches = packer()[step()]
    first, second, idle = load(packer(), [step()])
    totals = tuple(sum(counts) for counts in zip(*(b.counts for b in batches), strict=True))
    assert first.counts == second.counts == idle.counts == totals
    assert first.tokens == sum(batch.num_tokens for batch in batches)
    assert [(m.first, m.last, m.batch.idle) for m in (first, second, idle)] == [
        (True, False, False),
        (False, False, False),
        (False, True, True),
    ]


def test_workers_pack_the_same_batches_in_the_same_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The working directory is not searched for modules."""
    (tmp_path / "random.py").write_text("raise SystemExit('this is not the standard library')")
    monkeypatch.chdir(tmp_path)
    steps = [step(number, None if number % 2 else [([[*range(12)]], False)]) for number in range(7)]
    for data_workers, kind in (
        (2, {"sampling": DEPTH_SAMPLING}),
        (1, {"sampling": BLOCK_SAMPLING}),
        (1, {"imitates_states": True, "ttt_steps": 1}),
        (1, {"ttt_steps": 2}),
    ):
        made = packer(**kind, data_workers=data_workers, row_tokens=256)
        if kind == {"ttt_steps": 2}:  # some steps fit, others do not
            made = replace(made, sizes=FixedSizes(60, (32, 28), 64, (60, 60)))
        loaded = [micro.batch for micro in load(made, steps)]
        assert_same_batches(loaded, packed_here(made, steps))
        assert_same_batches([batch.to(CPU.device) for batch in loaded], loaded)
        for batch in loaded:  # it moves to a GPU by one copy
            tensors = [*all_tensors(batch), *(plan.host for plan in batch.plans)]
            assert len({t.untyped_storage().data_ptr() for t in tensors}) == 1
            assert all(t.data_ptr() % 64 == 0 for t in tensors if t.numel())


def test_a_worker_opens_the_store(target: Target, tmp_path: Path) -> None:
    """Also an fp8 store, whose codes travel."""
    store = record_store(target, tmp_path, dtype="fp8")
    made = packer(store, row_tokens=sum(store.lengths), data_workers=1)
    steps = [step(0, [([[*range(len(store))]], False)])]
    (micro,) = load(made, steps)
    assert_same_batches([micro.batch], packed_here(made, steps))
    assert micro.batch.features.dtype == torch.bfloat16


@pytest.mark.gpu
@pytest.mark.parametrize("data_workers", [0, 2])
def test_batches_reach_a_gpu(data_workers: int, target: Target, tmp_path: Path) -> None:
    store = record_store(target, tmp_path, dtype="fp8")
    made = packer(store, row_tokens=sum(store.lengths), data_workers=data_workers)
    steps = [step(n, [([[*range(n, n + 3)]], False), ([[n]], True)]) for n in range(9)]
    loaded = [micro.batch for micro in load(made, steps, GPU)]
    assert all(batch.features.is_cuda for batch in loaded)
    on_cpu = [map_tensors(batch, lambda t: t.cpu()) for batch in loaded]
    assert_same_batches(on_cpu, packed_here(made, steps))


def test_training_has_equal_bits_with_workers(tmp_path: Path) -> None:
    settings = {"steps": 7, "micro_rows": 2, "log_every": 1}
    heads = [
        trained(tmp_path / str(n), toy_store(20), orthogonal_parts(), data_workers=n, **settings)
        for n in (0, 2)
    ]
    first, other = (trainer.head.state_dict() for trainer in heads)
    assert all(torch.equal(first[name], other[name]) for name in first)
    assert_nothing_left()


@pytest.mark.parametrize("data_workers", [0, 1])
def test_an_error_of_training_leaves_nothing(
    data_workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same trainer can then resume."""
    trainers: list[Trainer] = []

    def fail(trainer: Trainer, _: MicroBatch) -> None:
        trainers.append(trainer)
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_accumulate", fail)
        with pytest.raises(ZeroDivisionError) as caught:
            trained(tmp_path, toy_store(20), orthogonal_parts(), steps=3, data_workers=data_workers)
    assert caught.value.__traceback__ is not None  # it keeps the objects of its frames
    assert_nothing_left()
    trainers[0].run()
    assert trainers[0].step == 3
    assert_nothing_left()


@pytest.mark.parametrize("method", ["_resume", "_train"])  # of the constructor, of the run
def test_an_error_before_the_first_step_leaves_nothing(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Trainer) -> None:
        assert len(workers(os.getpid())) == 1  # it has started by then
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, method, fail)
    with pytest.raises(KeyboardInterrupt) as caught:
        trained(tmp_path, toy_store(20), orthogonal_parts(), steps=3, data_workers=1)
    assert caught.value.__traceback__ is not None  # it keeps the objects of its frames
    assert_nothing_left()


@pytest.mark.parametrize("data_workers", [0, 1])
def test_ctrl_c_while_waiting_for_data(data_workers: int) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    made = packer(SlowStore(toy_store().records), data_workers=data_workers)
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            load(made, [step()] * 9)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert caught.value.__traceback__ is not None
    assert_nothing_left()


def test_errors_of_packing_arrive_as_they_are(target: Target, tmp_path: Path) -> None:
    store = record_store(target, tmp_path)
    shard = min(tmp_path.glob("shard-*"))
    made = packer(store, row_tokens=sum(store.lengths), data_workers=1)
    with pytest.raises(IndexError, match="has no record 99") as caught:
        load(made, [step(0, [([[99]], False)])])
    assert "in a data worker" in caught.value.__notes__[0]
    alone = BatchLoader(replace(made, settings=TrainSettings(data_workers=0)), CPU)
    with pytest.raises(IndexError, match="has no record 99"):
        list(alone.micro_batches([step(0, [([[99]], False)])]))
    there = BatchLoader(made, CPU)  # it has opened a shard, which its worker opens again
    shard.write_bytes(bytes(shard.stat().st_size))
    with pytest.raises(UserError, match="truncated or corrupt") as caught:
        list(there.micro_batches([step(0, [([[0]], False)])]))
    assert caught.value.where == str(shard)
    assert "in a data worker" in caught.value.__notes__[0]
    assert_nothing_left()


def test_an_error_that_cannot_be_pickled_arrives_as_text() -> None:
    made = packer(OddStore(toy_store().records), data_workers=1)
    with pytest.raises(RuntimeError, match=r"OddError\('this and that'\)"):
        load(made, [step()])


@pytest.mark.parametrize("change", ["recorded anew", "gone"])
def test_a_store_that_is_another_one_is_refused(
    change: str, target: Target, tmp_path: Path
) -> None:
    made = BatchLoader(packer(record_store(target, tmp_path, make_samples(4)), data_workers=1), CPU)
    shutil.rmtree(tmp_path)
    if change == "recorded anew":
        record_store(target, tmp_path, make_samples(4, seed=1))
    message = {"recorded anew": "recorded since", "gone": "manifest.json"}[change]
    with pytest.raises(UserError, match=message):
        list(made.micro_batches([step()]))


def test_a_worker_that_is_killed_is_named() -> None:
    steps = (step(number) for number in range(99))
    with closing(BatchLoader(packer(data_workers=1), CPU).micro_batches(steps)) as micro_batches:
        next(micro_batches)
        (worker,) = workers(os.getpid())
        for number in ENDING_SIGNALS:  # the process that trains writes a checkpoint first
            os.kill(worker, number)
        assert len(list(islice(micro_batches, 30))) == 30
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(UserError, match=r"data worker ended \(killed by SIGKILL\)") as caught:
            list(micro_batches)
    assert "train.data_workers=0" in caught.value.do
    assert_nothing_left()


def test_workers_end_with_the_process_that_trains() -> None:
    """The script has no `if __name__ == "__main__"`, and a worker does not run it again."""
    program = """
        import time, torch
        from draftlab.train.batch.loader import BatchLoader
        from draftlab.train.distributed.ranks import Ranks
        from tests.helpers.toy_training import packer, step
        loader = BatchLoader(packer(data_workers=2), Ranks(0, 1, torch.device("cpu")))
        micro_batches = loader.micro_batches([step()] * 99)
        next(micro_batches)
        print(flush=True)
        time.sleep(60)
    """
    words = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as training:
        assert training.stdout is not None
        assert training.stdout.readline() == "\n"
        pids = workers(training.pid)
        assert len(pids) == 2
        training.kill()
    deadline = time.monotonic() + 60
    while any(_is_worker(pid) for pid in pids):
        assert time.monotonic() < deadline, "a data worker is left"
        time.sleep(0.1)


def _is_worker(pid: int) -> bool:
    with suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z" and "batch.workers" in Path(f"/proc/{pid}/cmdline").read_text()
    return False


def test_a_gpu_has_data_workers_by_itself(target: Target, tmp_path: Path) -> None:
    assert BatchLoader(packer(), CPU).num_workers == 0
    stored = record_store(target, tmp_path)
    assert BatchLoader(packer(stored, data_workers=1), CPU).describe() == "1 data worker"
    assert BatchLoader(packer(stored), GPU).num_workers > 0
