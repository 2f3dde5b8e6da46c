"""The compacted, packed objective equals a server run position by position (methods §1, §2)."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from itertools import islice

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftlab.heads.eagle3 import Eagle3Head
from draftlab.store.store import Record
from draftlab.target_model.parts import TargetParts
from draftlab.train.batch import order as order_module
from draftlab.train.batch.loss_rows import loss_reach
from draftlab.train.batch.order import batches, epoch_rows
from draftlab.train.batch.packing import pack
from tests.helpers.loss_rows import reach_mask_t, reach_mask_t_k, server_rows
from tests.helpers.synthetic import (
    assert_same,
    family_loss,
    head,
    parts,
    record,
    spans_of,
    teacher_logits,
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


def reach_mask_t_1_k(spans: Tensor) -> Tensor:
    """A public bug: w_k(t) = mask[t + 1 + k]: one token past the end of each answer."""
    actual = loss_reach(spans)
    for t in range(len(spans) - 2):
        if spans[t + 1] > 0 and t + 2 + int(actual[t]) < len(spans):
            actual[t] += 1
    return actual


BUGS = [reach_mask_t, reach_mask_t_k, reach_mask_t_1_k]


@pytest.mark.parametrize("bug", BUGS)
def test_wrong_masks_are_caught(bug, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftlab.train.batch.loss_rows.loss_reach", bug)
    spans = spans_of([(3, 6), (2, 5)])
    target = parts()
    batch = pack([[record(spans, target)]], len(spans), 3)
    trained = {
        (int(t) - 1 - k, k) for k, rows in enumerate(batch.steps) for t in rows.teacher_index
    }
    assert trained != server_rows(spans, 3)


def reference_loss(
    model: Eagle3Head, target: TargetParts, records: list[Record], num_steps: int, gamma: float
) -> Tensor:
    """Written from methods §2 alone: every (t, k) on its own, explicit attention over a cache."""
    weights = dict(model.named_parameters())
    config = model.config
    eps, size = config.rms_norm_eps, config.head_dim
    groups = config.num_attention_heads // config.num_key_value_heads
    ids = torch.nonzero(model.t2d)[:, 0]

    def norm(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weights[name]

    def rotate(x: Tensor, position: int) -> Tensor:
        half = size // 2
        frequency = 10000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
        cos, sin = (position * frequency).cos(), (position * frequency).sin()
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def project(x: Tensor, name: str) -> Tensor:
        return (weights[f"layers.0.self_attn.{name}_proj.weight"] @ x).view(-1, size)

    total = torch.zeros((), dtype=weights["fc.weight"].dtype)
    for r in records:
        expected_rows = server_rows(r.spans, num_steps)
        features = r.features.to(total.dtype)

        def inputs(token: Tensor, hidden: Tensor) -> Tensor:
            e = norm(weights["embed_tokens.weight"][token], "layers.0.input_layernorm.weight")
            return torch.cat([e, norm(hidden, "layers.0.hidden_norm.weight")])

        for t in sorted({t for t, _ in expected_rows}):
            keys, values = [], []
            for p in range(t + 1):
                x = inputs(r.tokens[p + 1], weights["fc.weight"] @ features[p])
                keys.append(rotate(project(x, "k"), p))
                values.append(project(x, "v"))
            hidden = weights["fc.weight"] @ features[t]
            for k in range(num_steps):
                if (t, k) not in expected_rows:
                    break
                x = inputs(r.tokens[t + 1 + k], hidden)
                if k:
                    keys.append(rotate(project(x, "k"), t + k))
                    values.append(project(x, "v"))
                query = rotate(project(x, "q"), t + k)
                key = torch.stack(keys, 1).repeat_interleave(groups, 0)
                value = torch.stack(values, 1).repeat_interleave(groups, 0)
                scores = (key @ query[..., None])[..., 0] / math.sqrt(size)
                attended = (scores.softmax(-1)[..., None] * value).sum(1).flatten()
                hidden = hidden + weights["layers.0.self_attn.o_proj.weight"] @ attended
                x = norm(hidden, "layers.0.post_attention_layernorm.weight")
                gate = F.silu(weights["layers.0.mlp.gate_proj.weight"] @ x)
                up = weights["layers.0.mlp.up_proj.weight"] @ x
                hidden = hidden + weights["layers.0.mlp.down_proj.weight"] @ (gate * up)
                log_q = (weights["lm_head.weight"] @ norm(hidden, "norm.weight")).log_softmax(-1)
                logits = teacher_logits(target, r.last[t + 1 + k])
                p = (logits[ids] - logits.logsumexp(-1)).exp().to(total.dtype)
                total = total - gamma**k * (p * log_q).sum()
    return total


@pytest.mark.usefixtures("float64")
def test_loss_and_gradients_equal_a_position_by_position_server() -> None:
    target, steps, gamma = parts(), 3, 0.8
    records = [
        record(spans_of(turns), target, seed)
        for seed, turns in enumerate([[(3, 6)], [(2, 4), (0, 3)], [(1, 1)], [(4, 9)]])
    ]
    model = head(target)
    batch = pack([records[:3], records[3:]], 64, steps)
    loss, sums = family_loss(model, target, batch, gamma=gamma)
    loss.backward()
    actual = {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}

    model.zero_grad()
    expected = reference_loss(model, target, records, steps, gamma)
    expected.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-12)
    assert_same(actual, {n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    assert sums.count.tolist() == [
        sum(k == step for r in records for _, k in server_rows(r.spans, steps))
        for step in range(steps)
    ]
    assert float(sums.count[0]) == batch.num_anchors


def test_packed_conversations_do_not_see_each_other() -> None:
    target = parts()
    one, two = (record(spans_of([(3, 8)]), target, seed) for seed in (1, 2))
    model = head(target)
    alone = [family_loss(model, target, pack([[r]], 64, 3), gamma=0.8)[0] for r in (one, two)]
    together = family_loss(model, target, pack([[one, two]], 64, 3), gamma=0.8)[0]
    assert float(together.detach()) == pytest.approx(float(sum(alone).detach()), rel=1e-6)


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


def earlier_epoch_rows(lengths: list[int], room: int, seed: int, epoch: int) -> list[list[int]]:
    """Assign records to rows as earlier versions did; their trainings continue in this order."""
    generator = np.random.default_rng([seed, epoch])
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []
    for record_number in generator.permutation(len(lengths)).tolist():
        fullest = bisect_left(open_rows, (lengths[record_number], 0))
        if fullest < len(open_rows):
            free, row = open_rows.pop(fullest)
        else:
            free, row = room, len(rows)
            rows.append([])
            if len(open_rows) == 64:
                del open_rows[0]
        rows[row].append(record_number)
        insort(open_rows, (free - lengths[record_number], row))
    return [rows[i] for i in generator.permutation(len(rows))]


@pytest.mark.parametrize("count", [1, 2, 255, 3000])
def test_the_order_is_that_of_earlier_versions(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.random.default_rng(count).integers(1, 400, count).tolist()
    monkeypatch.setattr(order_module, "_CHUNK", 100)
    epochs = [earlier_epoch_rows(lengths, 512, 5, epoch) for epoch in range(3)]
    assert epochs == [list(epoch_rows(lengths, 512, seed=5, epoch=epoch)) for epoch in range(3)]
    rows = [row for epoch in epochs for row in epoch]
    for first in range(0, len(rows) // 4 - 1, 7):
        steps = batches(lengths, 512, 4, seed=5, first=first)
        assert next(steps) == rows[4 * first : 4 * first + 4]


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
