"""The compacted, packed objective equals a server run position by position (methods §1, §2)."""

from __future__ import annotations

from itertools import islice

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftlab.store.store import Record
from draftlab.train.batch.order import batches, epoch_rows
from draftlab.train.batch.packing import pack
from tests.helpers.loss_rows import server_rows
from tests.helpers.synthetic import (
    family_loss,
    head,
    parts,
    record,
    spans_of,
)

SPANS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 6)), min_size=1, max_size=4
)  # (prompt tokens, answer tokens) of each turn


@settings(max_examples=200, deadline=None)
@given(SPANS, st.integers(1, 5))
def test_loss_set_is_what_a_server_asks_for(turns: list[tuple[int, int]], k: int) -> None:
    # A server is asked after at least one prompt token.
    spans = torch.cat([torch.zeros(1, dtype=torch.int64), spans_of(turns)])
    target = parts()
    batch = pack([[record(spans, target)]], len(spans), k)
    trained = {
        (int(t) - 1 - step, step)
        for step, rows in enumerate(batch.steps)
        for t in rows.teacher_index
    }
    assert trained == server_rows(spans, k)


def test_a_token_outside_the_draft_vocabulary_stays_in_the_denominator() -> None:
    target = parts()
    r = record(spans_of([(2, 6)]), target)
    outside = Record(
        r.id, r.tokens, r.spans, r.features, r.last, r.logsumexp, torch.zeros_like(r.argmax), 0.0
    )
    _, sums = family_loss(head(target), target, pack([[outside]], 64, 3), gamma=0.8)
    assert sums.hits.sum() == 0
    assert sums.count.tolist() == [5, 4, 3]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=80), st.integers(50, 90), st.integers(0, 3)
)
def test_rows_hold_every_record_once(lengths: list[int], room: int, epoch: int) -> None:
    rows = list(epoch_rows(lengths, room, seed=1, epoch=epoch))
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= room for row in rows)
    assert rows == list(epoch_rows(lengths, room, seed=1, epoch=epoch))


def test_rows_are_full() -> None:
    assert len(epoch_rows([50] * 10, 100, seed=0, epoch=0)) == 5  # what just fits is let in
    lengths = [20 + 37 * i % 280 for i in range(2000)]
    rows = epoch_rows(lengths, 512, seed=0, epoch=0)
    assert sum(lengths) / (512 * len(rows)) > 0.95


def test_epochs_differ_and_leave_nothing_out() -> None:
    lengths = [5 + i % 7 for i in range(40)]
    steps = batches(lengths, 32, 3, seed=0)
    drawn_records: list[int] = []
    while len(drawn_records) < 80:
        drawn_records += [i for row in next(steps) for i in row]
    assert sorted(drawn_records[:40]) == list(range(40)) == sorted(drawn_records[40:80])
    assert drawn_records[:40] != drawn_records[40:80]


def test_every_step_has_all_its_rows() -> None:
    """The rest of an epoch, here 2 of 130 rows, goes on with the next epoch."""
    steps = list(islice(batches([50] * 130, 64, 64, seed=3), 9))
    assert [len(rows) for rows in steps] == [64] * 9
    records = [row[0] for rows in steps for row in rows]
    epochs = [records[start : start + 130] for start in range(0, 520, 130)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(130))] * 4
    assert epochs == [
        [row[0] for row in epoch_rows([50] * 130, 64, seed=3, epoch=epoch)] for epoch in range(4)
    ]
