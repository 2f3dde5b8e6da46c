"""Batches: what packing puts where, and their way through one block of memory."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from draftlab.store.store import Record
from draftlab.train.batch.loss_rows import joint_reach, loss_reach
from draftlab.train.batch.packing import Batch, pack
from tests.helpers.synthetic import family_loss, head, parts, record, spans_of
from tests.helpers.toy_training import packer, step

SPANS = st.lists(st.sampled_from([0, 1, 2, 2**31 - 1]), min_size=1, max_size=6)


def record_of(spans: list[int]) -> Record:
    size = len(spans)
    tokens, wide, narrow = torch.arange(1, size + 1), torch.ones(size, 2), torch.ones(size)
    return Record(
        "r", tokens, torch.tensor(spans, dtype=torch.int32), wide, wide, narrow, tokens, 0.0
    )


def two_rows(one_row: bool = False) -> Batch:
    target = parts()
    turns = [[(3, 6)], [(2, 4), (0, 3)], [(1, 1)], [(4, 9)]]
    records = [record(spans_of(each), target, seed) for seed, each in enumerate(turns)]
    return pack([records[:2], records[2:]], 64, 3, one_row=one_row)


@given(st.lists(SPANS, min_size=1, max_size=5))
def test_records_do_not_reach_into_each_other(spans: list[list[int]]) -> None:
    """Also for records of one token, and for records that begin or end within an answer."""
    records = [record_of(each) for each in spans]
    expected = torch.cat([loss_reach(record.spans.long()) for record in records])
    actual = joint_reach([record.spans for record in records])
    assert actual.dtype == torch.int64
    assert actual.tolist() == expected.tolist()


def test_positions_and_documents() -> None:
    """Positions and document numbers restart with each record; padding is document -1."""
    records = [record_of([0] * size) for size in (3, 2, 4)]
    batch = pack([records[:2], records[2:]], 8, 1)
    assert batch.documents.tolist() == [[0, 0, 0, 1, 1], [0, 0, 0, 0, -1]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 0]]
    assert batch.tokens.tolist() == [[1, 2, 3, 1, 2], [1, 2, 3, 4, 0]]
    assert batch.features[1, 4].tolist() == [0, 0]
    one = pack([records[:2], records[2:]], 8, 1, one_row=True)
    assert one.documents.tolist() == [[0, 0, 0, 1, 1, 2, 2, 2, 2]]
    assert one.positions.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2, 3]]


def test_one_row_has_the_same_loss_and_no_padding() -> None:
    target, model = parts(), head(parts())
    rows, row = two_rows(), two_rows(one_row=True)
    assert len(row.tokens) == 1
    assert row.counts == rows.counts
    assert all(step.index.numel() == len(step.valid_rows) for step in row.steps)
    assert any(step.index.numel() > len(step.valid_rows) for step in rows.steps)
    expected, actual = (family_loss(model, target, batch, gamma=0.8)[0] for batch in (rows, row))
    torch.testing.assert_close(actual, expected)


def test_settings_and_step_decide_what_is_packed() -> None:
    eagle, split = packer(imitates_states=True, ttt_steps=1), packer(anchor_parts=2)
    keys = [int(eagle[step(number)][0].noise.key) for number in (3, 3, 4)]
    assert keys[0] == keys[1] != keys[2]
    assert [len(batch.passes) for batch in split[step()]] == [2, 2, 2]
