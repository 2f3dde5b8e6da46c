"""What carries loss in records that lie one behind the other."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from draftlab.data.rows import joint_reach, loss_reach
from draftlab.data.store import Record

SPANS = st.lists(st.sampled_from([0, 1, 2, 2**31 - 1]), min_size=1, max_size=6)


def of_spans(spans: list[int]) -> Record:
    nothing = torch.zeros(len(spans))
    marks = torch.tensor(spans, dtype=torch.int32)
    return Record("r", nothing, marks, nothing, nothing, nothing, nothing, 0.0)


@given(st.lists(SPANS, min_size=1, max_size=5))
def test_records_do_not_reach_into_each_other(spans: list[list[int]]) -> None:
    """Records of one token, and such as begin or end within an answer, whatever lies beside."""
    records = [of_spans(each) for each in spans]
    expected = torch.cat([loss_reach(record.spans.long()) for record in records])
    found = joint_reach(records)
    assert found.dtype == torch.int64
    assert found.tolist() == expected.tolist()
