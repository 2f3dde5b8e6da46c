"""The compacted, packed objective equals a server run position by position (methods §1, §2)."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftlab.heads.head import DraftHead
from draftlab.store.store import Record
from draftlab.train.batch.order import batches, epoch_rows
from draftlab.train.batch.packing import pack
from draftlab.train.objectives.ttt import unroll
from tests.helpers.dense_attention import dense_chain
from tests.helpers.synthetic import (
    HIDDEN,
    VOCAB,
    assert_same,
    family_loss,
    head,
    parts,
    record,
    server_rows,
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


STEPS = 4
KIND = {
    "attention_chunk_size": 4,
    "use_qk_norm": True,
    "attn_temperature_tuning": True,
    "floor_scale": 3,
    "attn_scale": 0.5,
}


def llama4_head(*no_rope_layers: int, **kind: object) -> DraftHead:
    return head(
        parts(),
        family="eagle_llama4",
        boundaries=(4,),
        draft_vocab_size=VOCAB,
        num_layers=len(no_rope_layers),
        llama4=KIND | {"no_rope_layers": no_rope_layers} | kind,
    )


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("layers", [(1,), (0,), (1, 0), (0, 1)])
def test_an_unroll_over_borders_is_a_server(layers: tuple[int, ...]) -> None:
    """Outputs and gradients, of two conversations in a row; unrolls cross up to two borders."""
    model = llama4_head(*layers)
    spans = [0, 0, *[1] * 7, 0, *[2] * 4], [0, *[1] * 10]
    answers = [record(torch.tensor(s), parts(), seed) for seed, s in enumerate(spans)]
    batch = pack([answers], 40, STEPS)
    offsets = [0, len(spans[0])]
    compared, actual, expected = 0, torch.zeros(()), torch.zeros(())
    chains: dict[int, list[Tensor]] = {}
    probe = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(1))
    for k, step in enumerate(unroll(model, batch)):
        for row, teacher in zip(step.output, step.teacher_index.tolist(), strict=True):
            at = teacher - 1 - k
            which = at >= offsets[1]
            if at not in chains:
                chains[at] = dense_chain(
                    model, answers[which].tokens, answers[which].last, at - offsets[which]
                )
            torch.testing.assert_close(row, chains[at][k], rtol=0, atol=1e-12)
            actual, expected = actual + probe @ row, expected + probe @ chains[at][k]
            compared += 1
    assert compared == sum(batch.counts) > 40
    weights = {n: p for n, p in model.named_parameters() if p.requires_grad}
    one, other = (
        dict(zip(weights, torch.autograd.grad(total, [*weights.values()]), strict=True))
        for total in (actual, expected)
    )
    assert_same(one, other)
