"""The order of training in windows."""

from __future__ import annotations

from itertools import chain, islice, pairwise

import numpy as np
import pytest

from draftlab.errors import UserError
from draftlab.store.manifest import Counts, Dropped, Manifest, StoreIdentity, StoreWindow
from draftlab.store.record_index import RecordIndex
from draftlab.store.recording_plan import check_window
from draftlab.train.batch.window_order import WindowOrder

IDENTITY = StoreIdentity("t", "f", "tok", "tpl", (1, 2), 4, 8, 100, "bfloat16")
ROW_TOKENS, BATCH_ROWS, HELD_OUT = 64, 4, 3


def planned(window: int, num_shards: int = 40, seed: int = 0) -> Manifest:
    """Return a plan with three held-out records in the first shard."""
    generator = np.random.default_rng(seed)
    counts = [HELD_OUT] + [8] * num_shards
    lengths = generator.integers(5, 40, sum(counts))
    ids = [f"r{number}" for number in range(len(lengths))]
    index = RecordIndex.of(ids, lengths, np.zeros(len(ids)), counts)
    return Manifest.plan(
        index,
        identity=IDENTITY,
        samples_sha256="0",
        settings=StoreWindow(window, True, 0.1, 0, HELD_OUT, 1).settings(),
        counts=Counts(records=len(ids), tokens=int(lengths.sum()), loss_tokens=1),
        dropped=Dropped(),
        truncated=0,
    )


def whole_size(manifest: Manifest) -> int:
    return int(WindowOrder(manifest, 0).sizes.sum())


@pytest.mark.parametrize("share", [0.3, 0.45, 0.7, 1.0, 3.0])
@pytest.mark.parametrize("seed", [0, 7])
def test_an_epoch_has_each_shard_once_in_groups_of_at_most_half_a_window(
    share: float, seed: int
) -> None:
    window = int(share * whole_size(planned(1)))
    order = WindowOrder(planned(window), seed)
    for epoch in range(5):
        groups = order.epoch(epoch)
        assert sorted(chain.from_iterable(groups)) == list(range(40))
        sizes = [order.sizes[group].sum() for group in groups]
        assert max(sizes) <= window // 2 or len(groups) == 1
        if len(groups) > 1:  # none is so small that the next one has no time to be recorded
            assert min(sizes) > order.sizes.sum() / order.num_groups - order.sizes.max()
    assert order.epoch(0) != order.epoch(1)
    assert order.epoch(0) != WindowOrder(planned(window), seed + 1).epoch(0)
    assert order.epoch(3) == WindowOrder(planned(window), seed).epoch(3)


def test_the_groups_of_a_huge_store_are_cut_as_those_of_a_small_one() -> None:
    """Bytes times groups are larger than an int64: 1 PB in 20,000 groups is enough."""
    window = int(0.1 * whole_size(planned(1, 400)))
    order = WindowOrder(planned(window, 400), 0)
    expected = order.epoch(0)
    scale = 10**18 // int(order.sizes.sum())
    order.sizes, order._total = order.sizes * scale, order._total * scale
    assert order.num_groups > 8
    assert order.epoch(0) == expected


@pytest.mark.parametrize("share", [0.6, 3.0])
def test_steps_have_every_record_once_an_epoch_and_say_which_groups_are_finished(
    share: float,
) -> None:
    manifest = planned(int(share * whole_size(planned(1))))
    lengths = manifest.index.lengths
    order, again = WindowOrder(manifest, 3), WindowOrder(manifest, 3)
    steps = list(islice(order.steps(lengths, ROW_TOKENS, BATCH_ROWS), 300))
    assert steps == list(islice(again.steps(lengths, ROW_TOKENS, BATCH_ROWS), 300))
    assert all(len(step.rows) == BATCH_ROWS for step in steps)
    for row in (row for step in steps for row in step.rows):
        assert sum(lengths[record] for record in row) <= ROW_TOKENS
    records = [record for step in steps for row in step.rows for record in row]
    training = range(HELD_OUT, len(lengths))
    for epoch in range(len(records) // len(training)):
        part = records[epoch * len(training) : (epoch + 1) * len(training)]
        assert sorted(part) == list(training)
    groups = [set(group) for group in islice(order.groups(), steps[-1].group + 2)]
    shard_of = [number - 1 for number, s in enumerate(manifest.shards) for _ in range(s.records)]
    for step, following in pairwise(steps):
        shards = {shard_of[record] for row in step.rows for record in row}
        before = set().union(*groups[max(0, step.group - 1) : step.group + 1])
        assert shards <= before
        assert shards & groups[step.group]
        later = {shard_of[record] for row in following.rows for record in row}
        assert later <= set().union(*groups[step.finished_groups : following.group + 1])
        assert step.finished_groups in (step.group, step.group + 1)
        assert following.finished_groups >= step.finished_groups


def test_the_needed_groups_are_those_that_steps_read() -> None:
    manifest = planned(int(0.6 * whole_size(planned(1))))
    lengths = manifest.index.lengths
    order = WindowOrder(manifest, 3)
    *_, last = islice(order.steps(lengths, ROW_TOKENS, BATCH_ROWS), 100)
    needed = list(order.needed(100 * BATCH_ROWS, ROW_TOKENS))
    assert last.group < len(needed) <= last.group * 1.2 + 2
    assert needed == list(islice(order.groups(), len(needed)))


def test_windows_that_are_too_small_are_refused() -> None:
    order = WindowOrder(planned(1_000_000), 0)
    largest = int(order.sizes.max())
    window = StoreWindow(3 * largest, True, 0.1, 0, HELD_OUT, 1)
    with pytest.raises(UserError, match="at least four shards"):
        check_window(window, order.sizes)
    order = WindowOrder(planned(5 * largest), 0)
    with pytest.raises(UserError, match="whose half holds an optimizer step of 64 × 64") as caught:
        order.check_steps(64, 64)
    enough = int(caught.value.do.split()[3].replace(",", ""))
    assert enough <= max(order.sizes.sum(), 4 * largest), "all shards fit into more"
    WindowOrder(planned(enough), 0).check_steps(64, 64)
