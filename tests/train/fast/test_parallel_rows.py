"""The rows of parallel drafting's fast pass, where anchors keep different numbers of depths."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from draftlab.store.store import Record
from draftlab.train.batch.packing import Batch, pack
from draftlab.train.fast.parallel import FastParallel, attention_rows
from draftlab.train.objectives.parallel import parallel_outputs
from tests.helpers.fast_forward import random_norms_head, train_step
from tests.helpers.synthetic import assert_same, parts, record, spans_of


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("one_row", [False, True])
def test_anchors_may_keep_any_depths(one_row: bool, num_layers: int) -> None:
    batch = batch_of_any_depths(one_row)
    model = random_norms_head(family="peagle", num_layers=num_layers)
    actual = train_step(model, FastParallel(torch.float64)(model, batch), batch)
    assert_same(actual, train_step(model, list(parallel_outputs(model, batch)), batch))


def batch_of_any_depths(one_row: bool) -> Batch:
    """Neighbouring anchors have different numbers of masked slots, some none."""
    records = [record(spans_of([(2, 9)]), parts(), seed) for seed in range(4)]

    def depths(each: Record) -> Tensor:
        generator = np.random.default_rng(int(each.id.removeprefix("r")))
        return torch.from_numpy(generator.integers(1, 5, len(each.tokens)))

    batch = pack([records[:3], records[3:]], 40, 4, max_steps=depths, one_row=one_row)
    assert len({*batch.counts}) == 4
    return batch


@pytest.mark.parametrize("one_row", [False, True])
def test_what_kernels_alone_read(one_row: bool) -> None:
    """The readers of masked slots, padding and segments, which no CPU needs."""
    batch = batch_of_any_depths(one_row)
    num_masked = sum(batch.counts[1:])
    first = batch.tokens.numel(), batch.counts[0]
    for rows, num_first in zip(attention_rows(batch, batch.steps), first, strict=True):
        layout = rows.layout
        seeing = layout.starts <= layout.index
        is_row = rows.pad(torch.ones(num_first + num_masked)) == 1
        assert torch.equal(seeing, is_row & (batch.documents.gather(1, layout.index) >= 0))
        assert layout.segments[0] == 0
        assert layout.segments.diff().tolist() == list(layout.sizes)
        depth = torch.arange(4).repeat_interleave(torch.tensor(layout.sizes))
        readers = torch.full((3, num_masked), -1)
        for b, r in (seeing & (depth > 0)).nonzero().tolist():
            of_anchor = layout.slots[: depth[r], b, r]
            readers[depth[r] - 1, of_anchor] = b * len(depth) + r
        assert torch.equal(layout.readers, readers)
