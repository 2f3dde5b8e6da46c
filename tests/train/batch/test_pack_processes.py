"""Other processes pack what this one would, say why they cannot, and end with it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftlab.errors import UserError
from draftlab.store.store import Store
from draftlab.target_model.loading import load_target
from draftlab.target_model.model import Target
from draftlab.target_model.settings import TargetSettings
from draftlab.train import loop
from draftlab.train.batch import pack_processes
from draftlab.train.batch.loader import Piece, feed
from draftlab.train.batch.pack_processes import PackHere, PackProcesses, choose_packing
from draftlab.train.batch.packer import Packer, StepWork
from draftlab.train.batch.packing import Batch, anywhere, map_tensors
from draftlab.train.batch.shared_memory import Region, lay, pick_up
from draftlab.train.distributed.ranks import Ranks
from draftlab.train.loop import Trainer
from draftlab.train.settings import TrainSettings
from tests.helpers.list_store import ListStore
from tests.helpers.recordings import make, make_samples
from tests.helpers.toys import toy_target_folder
from tests.store.test_online import online
from tests.train.test_learning import orthogonal_parts, toy_answer, trained

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memory without a name")
CPU = torch.device("cpu")


def packer(
    store: Any = None, *, drops: bool = False, imitates: bool = False, **settings: Any
) -> Packer:
    """Of toy answers: four rows of 64 positions, three steps."""
    target = orthogonal_parts()
    if store is None:
        store = ListStore([toy_answer(target, number) for number in range(12)])
    fields = {"row_tokens": 64, "batch_rows": 4, "ttt_steps": 3}
    settings = TrainSettings.model_validate(fields | settings)
    return Packer(store, settings, 7, drops, imitates, one_row=True)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = toy_target_folder(tmp_path_factory.mktemp("target"))
    return load_target(TargetSettings(path=str(folder), dtype="float32"))


def work(step: int = 3, micro: int = 2) -> StepWork:
    """Micro-batches of some toy answers; the last is idle."""
    rows = [([[number, number + 1], [number + 2]], False) for number in range(micro)]
    return StepWork(step, [*rows, ([[0]], True)])


def everything(batch: Batch) -> list[Any]:
    """Bits, shapes and dtypes of all tensors of a batch, and what is no tensor."""
    found: list[Tensor] = []
    map_tensors(batch, lambda t: found.append(t) or t)
    found += [plan.host for plan in batch.plans]
    plain = [t.flatten().clone(memory_format=torch.contiguous_format) for t in found]
    bits = [t.view(torch.uint8).tolist() for t in plain]
    tensors = [(t.dtype, t.shape, each) for t, each in zip(found, bits, strict=True)]
    return [*tensors, batch.records, batch.num_tokens, batch.idle, batch.counts]


def same(found: list[Batch], expected: list[Batch]) -> None:
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert everything(one) == everything(other)


@pytest.fixture
def region() -> Iterator[Region]:
    memory = os.memfd_create("test")
    yield Region(memory)
    os.close(memory)


@pytest.mark.parametrize("kind", ["chain", "parallel", "eagle", "parts", "rows"])
def test_batches_of_every_kind_survive_the_way(kind: str, region: Region) -> None:
    made = {
        "chain": packer(),
        "parallel": packer(drops=True),
        "eagle": packer(imitates=True, ttt_steps=1),
        "parts": packer(anchor_parts=2),
        "rows": replace(packer(), one_row=False),
    }[kind]
    expected = PackHere(made, CPU)(work())
    same([b.decoded() for b in pick_up(lay(made, work(), region), region, anywhere)], expected)
    assert expected[-1].idle
    assert (expected[0].noise is not None) == (kind == "eagle")


def test_settings_and_step_say_what_is_packed() -> None:
    eagle, dealt = packer(imitates=True, ttt_steps=1), packer(anchor_parts=2)
    noise = [next(eagle.batches(work(step))).noise for step in (3, 3, 4)]
    keys = [int(each.key) for each in noise if each is not None]
    assert keys[0] == keys[1] != keys[2]
    assert [len(batch.passes) for batch in dealt.batches(work())] == [2, 2, 2]


def test_batches_are_those_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the user works is no place to look for modules."""
    (tmp_path / "signal.py").write_text("raise SystemExit('not the signal that was meant')")
    monkeypatch.chdir(tmp_path)
    made = packer(drops=True)
    with closing(PackProcesses(made, 2, CPU)) as there:
        for step in range(3):
            same(there(work(step)), PackHere(made, CPU)(work(step)))
        (process,) = there._idle
    assert process.region.memory == -1  # or it might reach another file of that number


def test_a_store_is_read_where_it_lies(target: Target, tmp_path: Path) -> None:
    """fp8: codes arrive as they are stored, in one piece of memory with all the rest."""
    store = make(target, tmp_path, dtype="fp8")
    made = packer(store, row_tokens=sum(store.lengths))
    asked = StepWork(0, [([[*range(len(store))]], False)])
    (here,) = PackHere(made, CPU)(asked)
    with closing(PackProcesses(made, 1, CPU)) as there:
        same(there(asked), [here])
    assert here.features.dtype == torch.bfloat16


@pytest.mark.gpu
def test_batches_reach_a_gpu(target: Target, tmp_path: Path) -> None:
    """From pinned memory, through the feed, while others are packed: as they are on a CPU."""
    store = make(target, tmp_path, dtype="fp8")
    made, gpu = packer(store, row_tokens=sum(store.lengths)), torch.device("cuda")
    works = [StepWork(n, [([[*range(n, n + 3)]], False), ([[n]], True)]) for n in range(9)]
    expected = [batch for each in works for batch in PackHere(made, CPU)(each)]
    with closing(PackProcesses(made, 2, gpu)) as there:
        assert there(works[0])[0].features.is_pinned()
        found = [piece.batch for piece in feed(iter(works), there, gpu, there.threads)]
    assert all(batch.features.is_cuda for batch in found)
    same([map_tensors(batch, lambda t: t.cpu()) for batch in found], expected)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.booleans())
def test_any_batches_lie_in_one_memory(sizes: list[int], drops: bool) -> None:
    """Whatever their sizes and order: the memory grows, and is used again."""
    memory = os.memfd_create("test")
    region, seen, made = Region(memory), Region(memory), packer(drops=drops, row_tokens=512)
    for step, size in enumerate(sizes):
        asked = StepWork(step, [([[*range(size)]], False), ([[0]], True), ([[size - 1, 0]], False)])
        rooms: list[Tensor] = []

        def room(shape: tuple[int, ...], dtype: torch.dtype, rooms: Any = rooms) -> Tensor:
            rooms.append(torch.full(shape, 255, dtype=dtype))
            return rooms[-1]

        laid = lay(made, asked, region)
        assert all(each.start % 64 == 0 for each in laid)  # of any dtype a multiple
        found = pick_up(laid, seen, room)
        same([batch.decoded() for batch in found], PackHere(made, CPU)(asked))
        assert len(seen._maps) == 1
        assert len(rooms) == len(found)  # one copy each, to the device too
        for batch, whole in zip(found, rooms, strict=True):
            home = whole.untyped_storage().data_ptr()
            map_tensors(batch, lambda t, h=home: t.untyped_storage().data_ptr() == h or 1 / 0)
            for plan in batch.plans:  # which stays with the batch when its copy is given back
                assert plan.host.untyped_storage().data_ptr() != home
    os.close(memory)


def test_memory_grows_and_keeps_what_was_taken(region: Region) -> None:
    first = region.take((3,), torch.int64).fill_(5)
    second = region.take((1 << 20,), torch.float32).fill_(2)
    assert first.tolist() == [5, 5, 5]
    assert bool((second == 2).all())
    assert region.offset(first) == 0
    assert region.offset(second) == 64
    assert region.offset(second[::2]) is None
    assert region.offset(torch.zeros(3)) is None
    grown = os.fstat(region.memory).st_size
    region.clear()
    region.take((1 << 20,), torch.float32)
    assert os.fstat(region.memory).st_size == grown


def test_memory_is_used_again(region: Region) -> None:
    made, asked = packer(), work()
    lay(made, asked, region)
    size = os.fstat(region.memory).st_size
    for _ in range(20):
        lay(made, asked, region)
    assert os.fstat(region.memory).st_size == size
    assert len(region._maps) == 1
    region.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        region.take((3,), torch.int64)


def test_training_is_the_same(tmp_path: Path) -> None:
    """Weights, to the bit, from two processes and from threads."""
    target = orthogonal_parts()
    store = ListStore([toy_answer(target, number) for number in range(20)])
    made = [
        trained(tmp_path / str(n), store, target, steps=7, micro_rows=2, log_every=1, packers=n)
        for n in (0, 2)
    ]
    first, other = (trainer.head.state_dict() for trainer in made)
    assert all(torch.equal(first[name], other[name]) for name in first)
    assert nobody_packs()


def nobody_packs() -> bool:
    """Whether no thread, process or memory is left of packing."""
    mine = [t.name for t in threading.enumerate() if t.name.startswith(("pack", "ahead"))]
    maps = Path("/proc/self/maps").read_text()
    return not mine and "draftlab-batches" not in maps and not children()


def children() -> list[int]:
    """Processes that this one began, and that pack."""
    folders = [path for path in Path("/proc").iterdir() if path.name.isdigit()]
    found = []
    for folder in folders:
        with suppress(OSError):
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == os.getpid() and "pack_processes" in (folder / "cmdline").read_text():
                found.append(int(folder.name))
    return found


def test_more_threads_than_processes() -> None:
    """A process that is given back has been read."""
    made = packer()
    with closing(PackProcesses(made, 2, CPU)) as there, ThreadPoolExecutor(6) as pool:
        found = list(pool.map(there, map(work, range(40))))
        assert len(children()) == 2
        assert all(os.getpgid(each) == each for each in children())  # Ctrl-C reaches none
    for step, batches in enumerate(found):
        same(batches, PackHere(made, CPU)(work(step)))
    assert nobody_packs()


@pytest.mark.parametrize("packers", [0, 2])
def test_a_fault_of_training_leaves_nothing(
    packers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do threads outlive what they use: the same trainer can go on."""
    seen: list[Any] = []
    fed, accumulate = loop.feed, Trainer._accumulate
    monkeypatch.setattr(loop, "feed", lambda *given: seen.append(given[3]) or fed(*given))

    def broken(trainer: Trainer, piece: Piece) -> None:
        seen.append(trainer)
        raise ZeroDivisionError

    monkeypatch.setattr(Trainer, "_accumulate", broken)
    store = ListStore([toy_answer(orthogonal_parts(), number) for number in range(20)])
    with pytest.raises(ZeroDivisionError) as caught:
        trained(tmp_path, store, orthogonal_parts(), steps=3, packers=packers)
    assert caught.value.__traceback__ is not None  # which keeps what its frames hold
    assert nobody_packs()
    threads, trainer = seen
    assert threads == (packers or None)
    monkeypatch.setattr(Trainer, "_accumulate", accumulate)
    trainer.run()
    assert trainer.step == 3
    assert nobody_packs()


def test_ctrl_c_while_waiting_for_data() -> None:
    def slow(_: Any) -> list[Batch]:
        time.sleep(0.6)
        return list(packer().batches(work()))

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt) as caught, closing(feed(range(9), slow, CPU)) as fed:
            next(fed)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert caught.value.__traceback__ is not None
    assert nobody_packs()


def test_faults_arrive_as_they_are(tmp_path: Path, target: Target) -> None:
    store = make(target, tmp_path)
    made = packer(Store.open(tmp_path), row_tokens=sum(store.lengths))
    with closing(PackProcesses(made, 1, CPU)) as there:
        with pytest.raises(IndexError, match="has no record 99"):
            there(StepWork(0, [([[99]], False)]))
        assert len(there(StepWork(0, [([[0]], False)]))) == 1  # and the next work is done
    shard = min(tmp_path.glob("shard-*"))
    shard.write_bytes(bytes(shard.stat().st_size))
    with closing(PackProcesses(made, 1, CPU)) as there:
        with pytest.raises(UserError, match="truncated or corrupt") as caught:
            there(StepWork(0, [([[0]], False)]))
        assert caught.value.where == str(shard)
        assert "in a process that packs" in caught.value.__notes__[0]


class Odd(ListStore):
    """Raises what cannot travel."""

    class Fault(Exception):
        def __init__(self, one: str, two: str) -> None:
            super().__init__(f"{one} and {two}")

    def views(self, indices: Any) -> Any:
        raise Odd.Fault("this", "that")


def test_a_fault_that_cannot_travel_is_told() -> None:
    with closing(PackProcesses(packer(Odd([])), 1, CPU)) as there:
        with pytest.raises(RuntimeError, match=r"Fault\('this and that'\)") as caught:
            there(work())
        assert "in a process that packs" in caught.value.__notes__[0]


def test_another_store_in_its_place_is_none(target: Target, tmp_path: Path) -> None:
    made = packer(make(target, tmp_path, make_samples(4)))
    there = PackProcesses(made, 1, CPU)
    shutil.rmtree(tmp_path)
    make(target, tmp_path, make_samples(4, seed=1))
    with closing(there), pytest.raises(UserError, match="one that was recorded since"):
        there(work())


def test_a_process_that_ends_is_named() -> None:
    with closing(PackProcesses(packer(), 1, CPU)) as there:
        there(work())
        os.kill(*children(), signal.SIGKILL)
        with pytest.raises(
            UserError, match=r"that packs batches ended \(killed by SIGKILL\)"
        ) as caught:
            there(work())
        assert "train.packers=0" in caught.value.do
        same(there(work()), PackHere(packer(), CPU)(work()))


def test_processes_end_with_the_one_that_trains() -> None:
    """However that ends: nobody tells them."""
    program = """
        import time, torch
        from tests.train.test_pack_processes import children, packer, work
        from draftlab.train.pack_processes import PackProcesses
        here = PackProcesses(packer(), 1, torch.device("cpu"))
        there = PackProcesses(packer(), 1, torch.device("cpu"))
        here(work()), there(work())
        print(*children(), flush=True)
        time.sleep(60)
    """
    words = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as training:
        assert training.stdout is not None
        pids = [int(word) for word in training.stdout.readline().split()]
        assert len(pids) == 2
        training.kill()
    until = time.monotonic() + 30
    while any(Path(f"/proc/{pid}/cmdline").exists() and _runs(pid) for pid in pids):
        assert time.monotonic() < until, "a process that packs is left"
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    """Whether it does anything still; one that nobody waited for keeps its number."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_where_there_can_be_none(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, nobody = torch.device("cuda"), Ranks(0, 1, CPU)
    made_here = packer(online(target, make_samples()), packers=2)
    with pytest.raises(UserError, match="asks for 2 processes, and this store is no folder"):
        choose_packing(made_here, nobody)
    usual = replace(made_here, settings=TrainSettings())
    assert isinstance(choose_packing(usual, Ranks(0, 1, gpu)), PackHere)
    assert isinstance(choose_packing(packer(), nobody), PackHere)

    class Own(Store):
        """What it adds is not in its folder."""

    stored = make(target, tmp_path)
    assert isinstance(choose_packing(packer(stored, packers=1), nobody), PackProcesses)
    own = packer(Own(stored.folder, stored.manifest))
    assert isinstance(choose_packing(own, Ranks(0, 1, gpu)), PackHere)
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(UserError, match="no memory to share"):
        choose_packing(packer(packers=1), nobody)
    assert isinstance(choose_packing(packer(), Ranks(0, 1, gpu)), PackHere)


def test_a_store_that_is_gone_is_named(target: Target, tmp_path: Path) -> None:
    """A process says at its first work why it cannot begin."""
    made = packer(make(target, tmp_path))
    (tmp_path / "manifest.json").unlink()
    with closing(PackProcesses(made, 1, CPU)) as there:
        for _ in range(2):
            with pytest.raises(UserError, match=r"expected a store's manifest.json"):
                there(work())


def test_how_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, gpus, expected in ((16, 1, 4), (64, 4, 4), (12, 4, 1), (2, 1, 1), (1, 1, 1)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, n=cores: set(range(n)))
        assert pack_processes.usual_number(gpus) == expected
