"""Records that lie one behind the other: where, and what of them carries loss."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from draftlab.store.store import Record
from draftlab.train.batch.loss_rows import joint_reach, loss_reach
from draftlab.train.batch.packing import pack

SPANS = st.lists(st.sampled_from([0, 1, 2, 2**31 - 1]), min_size=1, max_size=6)


def of_spans(spans: list[int]) -> Record:
    size = len(spans)
    tokens, wide, narrow = torch.arange(1, size + 1), torch.ones(size, 2), torch.ones(size)
    marks = torch.tensor(spans, dtype=torch.int32)
    return Record("r", tokens, marks, wide, wide, narrow, tokens, 0.0)


@given(st.lists(SPANS, min_size=1, max_size=5))
def test_records_do_not_reach_into_each_other(spans: list[list[int]]) -> None:
    """Records of one token, and such as begin or end within an answer, whatever lies beside."""
    records = [of_spans(each) for each in spans]
    expected = torch.cat([loss_reach(record.spans.long()) for record in records])
    found = joint_reach(records)
    assert found.dtype == torch.int64
    assert found.tolist() == expected.tolist()


def test_what_lies_where() -> None:
    """Positions and numbers of records begin anew; behind the last one is padding, document -1."""
    records = [of_spans([0] * size) for size in (3, 2, 4)]
    batch = pack([records[:2], records[2:]], 8, 1)
    assert batch.documents.tolist() == [[0, 0, 0, 1, 1], [0, 0, 0, 0, -1]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 0]]
    assert batch.tokens.tolist() == [[1, 2, 3, 1, 2], [1, 2, 3, 4, 0]]
    assert batch.features[1, 4].tolist() == [0, 0]
    one = pack([records[:2], records[2:]], 8, 1, one_row=True)
    assert one.documents.tolist() == [[0, 0, 0, 1, 1, 2, 2, 2, 2]]
    assert one.positions.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2, 3]]
