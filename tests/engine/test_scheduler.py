"""Which sequences the scheduler admits, and when their blocks are extended."""

from __future__ import annotations

from draftlab.engine.kv_pool import BlockPool
from draftlab.engine.sampling import Request
from draftlab.engine.scheduler import Scheduler


def new_scheduler(count: int, slots: int, *, max_length: int = 40) -> Scheduler:
    requests = [Request(str(n), (1, 2, 3), 30) for n in range(count)]
    return Scheduler(requests, BlockPool(10_000, 4), slots, 0, max_length)


def test_a_large_batch_admits_several_at_once() -> None:
    scheduler = new_scheduler(266, 256)
    assert len(scheduler.admit()) == 256
    for _ in range(7):
        scheduler.remove(scheduler.running[0])
        assert scheduler.admit() == []  # fewer than 256 / 32 slots are free
    scheduler.remove(scheduler.running[0])
    assert len(scheduler.admit()) == 8
    scheduler.remove(scheduler.running[0])
    assert scheduler.admit() == []
    scheduler.remove(scheduler.running[0])
    assert len(scheduler.admit()) == 2  # as many as wait
    assert not scheduler.waiting


def test_a_small_batch_admits_each_at_once_and_an_empty_one_waits_for_none() -> None:
    small = new_scheduler(260, 255)
    small.admit()
    small.remove(small.running[0])
    assert len(small.admit()) == 1
    large = new_scheduler(400, 256)
    large.admit()
    for sequence in list(large.running):
        large.remove(sequence)
    large.waiting = type(large.waiting)([*large.waiting][:1])
    assert len(large.admit()) == 1


def test_blocks_are_extended_when_the_next_token_needs_one_and_never_beyond_the_limit() -> None:
    scheduler = new_scheduler(1, 1, max_length=10)
    (sequence,) = scheduler.admit()
    held = []
    while not sequence.finish:
        extended, is_enough = scheduler.reserve(0)
        assert is_enough
        held.append(len(sequence.blocks))
        assert bool(extended) == (len(held) > 1 and held[-1] > held[-2])
        assert held[-1] * 4 >= min(len(sequence.tokens) + 1, 10)
        sequence.add_result([7], 0, 0, [])
    assert held == [1, 2, 2, 2, 2, 3, 3]
    assert sequence.counters.undrafted_steps == len(sequence.steps) == 7
    assert sequence.finish == "length"
