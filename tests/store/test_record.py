"""Recording: the numbers in a record, the counts of the plan, and what is refused."""

from __future__ import annotations

from collections import namedtuple
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
import torch

from draftlab.errors import UserError
from draftlab.progress import Monitor
from draftlab.store import extraction
from draftlab.store import record as record_module
from draftlab.store.record import RecordSettings, record
from draftlab.store.recording_plan import PASS_TOKENS, batches_of, cut_batches
from draftlab.store.sample_table import Sample, teacher_mask
from draftlab.target_model.model import Target
from tests.helpers.monitors import RecordingMonitor
from tests.helpers.recordings import (
    BOUNDARIES,
    file_hashes,
    identity_of,
    make_samples,
    record_store,
    recorded_shapes,
)


def test_records_equal_transformers_states_of_each_sequence(target: Target, tmp_path: Path) -> None:
    samples = make_samples()
    store = record_store(target, tmp_path, samples)
    assert len(store.manifest.shards) > 2
    plan = store.manifest
    assert any(len(batch) > 2 for shard in plan.shards for batch in batches_of(plan, shard))
    pre_norm: list[torch.Tensor] = []
    hook = target.norm.register_forward_pre_hook(lambda _, args: pre_norm.append(args[0]))
    for sample, stored in zip(samples, store, strict=True):
        ids = torch.tensor([sample.token_ids])
        with torch.no_grad():
            out = target.model(input_ids=ids, output_hidden_states=True)
        expected = torch.cat([out.hidden_states[b][0] for b in BOUNDARIES], -1)
        torch.testing.assert_close(stored.features, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(stored.last, pre_norm[-1][0], atol=1e-5, rtol=1e-5)
        logits = out.logits[0].double()
        taught = teacher_mask(stored.spans)
        assert 0 < int(taught.sum()) < len(taught)
        assert bool(stored.logsumexp[~taught].isnan().all())
        assert stored.argmax[~taught].unique().tolist() == [-1]
        torch.testing.assert_close(
            stored.logsumexp[taught].double(), logits.logsumexp(-1)[taught], atol=1e-4, rtol=0
        )
        # Another argmax is allowed only where two logits are equal to rounding.
        chosen = logits[taught].gather(1, stored.argmax[taught, None]).squeeze(1)
        torch.testing.assert_close(chosen, logits[taught].amax(-1), atol=1e-5, rtol=0)
        assert tuple(stored.tokens.tolist()) == sample.token_ids
        assert tuple(stored.spans.tolist()) == sample.spans
        assert (stored.id, stored.temperature) == (sample.id, sample.temperature)
    hook.remove()


def test_boundary_n_is_the_last_state_before_the_norm(target: Target, tmp_path: Path) -> None:
    identity = identity_of(target, boundaries=(1, target.num_layers))
    settings = RecordSettings(dtype="float32", boundaries=(1, target.num_layers))
    store = record(target, make_samples(3), tmp_path, settings, identity, monitor=Monitor())
    for stored in store:
        assert torch.equal(stored.features[:, target.hidden_size :], stored.last)
        normed = target.norm(stored.last)
        assert (normed - stored.last).abs().max() > 0.1


def test_bfloat16_rounds_states_only(target: Target, tmp_path: Path) -> None:
    exact = record_store(target, tmp_path / "a")
    rounded = record_store(target, tmp_path / "b", dtype="bfloat16")
    for a, b in zip(exact, rounded, strict=True):
        assert b.features.dtype == b.last.dtype == torch.bfloat16
        assert torch.equal(a.features.bfloat16(), b.features)
        assert torch.equal(a.last.bfloat16(), b.last)
        # From the unrounded state: the same bits, and the token that the target generates.
        taught = teacher_mask(a.spans)
        assert torch.equal(a.logsumexp[taught], b.logsumexp[taught])
        assert torch.equal(a.argmax, b.argmax)
        # A teacher made from the rounded state is a distribution to rounding.
        mass = (target.logits(b.last.float()) - b.logsumexp[:, None]).exp().sum(-1)
        assert (mass[taught] - 1).abs().max() < 0.05


def test_logits_are_summarised_in_chunks_and_ties_are_the_lowest_id(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = torch.randn(7, target.hidden_size, generator=torch.Generator().manual_seed(0))
    logits = target.logits(last)
    for rows in (1, 3, 7, 100):
        monkeypatch.setattr(extraction, "MAX_LOGITS", rows * target.vocab_size)
        sums, tokens = extraction.summarise_logits(target, last)
        torch.testing.assert_close(sums, logits.logsumexp(-1))
        assert torch.equal(tokens, logits.argmax(-1))
    # All logits of a zero state are equal.
    assert extraction.summarise_logits(target, last * 0)[1].tolist() == [0] * 7


def test_dropped_and_truncated_samples_are_counted(target: Target, tmp_path: Path) -> None:
    spans = (0, 0, 1, 1, 1, 0, 2, 2, 2, 2)
    samples = [
        Sample("whole", tuple(range(10)), spans),
        Sample("long", tuple(range(30)), spans * 3),
        Sample("silent", (1, 2, 3, 4), (0, 0, 0, 0)),
        Sample("one token", (1, 2, 3, 4), (0, 0, 1, 0)),
        Sample("late answer", tuple(range(20)), (0,) * 12 + (1,) * 8),
    ]
    monitor = RecordingMonitor()
    store = record_store(target, tmp_path / "cut", samples, monitor, max_length=12)
    manifest = store.manifest
    assert store.ids == ["whole", "long"]
    assert list(store.lengths) == [10, 12]
    assert manifest.truncated == 1
    assert manifest.dropped.model_dump() == {"nothing_to_predict": 3}
    assert manifest.counts.model_dump() == {"records": 2, "tokens": 22, "loss_tokens": 14}
    assert "1 of 5 samples truncated to 12" in monitor.text
    (line,) = (line for line in monitor.lines if "3 of 5 samples dropped" in line)
    assert "1 of them after truncation" in line
    assert monitor.last_progress[1:3] == (22, 22)
    with pytest.raises(UserError, match="1 longer than 12 tokens, 0 without an answer"):
        record_store(target, tmp_path / "none", samples[-1:], max_length=12)


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ([], ["found none"]),
        ([Sample("mute", (1, 2, 3), (0, 0, 0))], ["1 without an answer"]),
        ([Sample("alien", (1, 2, 289), (0, 1, 1))], ["alien", "289"]),
        ([Sample("negative", (1, -2, 3), (0, 1, 1))], ["negative", "-2"]),
        ([Sample("twin", (1, 2, 3), (0, 1, 1))] * 2, ["twin", "twice"]),
    ],
)
def test_bad_samples_are_refused(
    target: Target, tmp_path: Path, samples: list[Sample], words: list[str]
) -> None:
    with pytest.raises(UserError) as caught:
        record_store(target, tmp_path / "store", samples)
    assert all(word in str(caught.value) for word in words)
    assert not (tmp_path / "store").exists()


def test_too_little_disk_is_refused(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(record_module.shutil, "disk_usage", lambda _: usage(10_000))
    with pytest.raises(UserError, match="free disk"):
        record_store(target, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [".lock"]


def test_no_sample_is_longer_than_the_target_has_positions(target: Target, tmp_path: Path) -> None:
    samples = [*make_samples(4), Sample("long", (1,) * 70, (0,) * 10 + (1,) * 60)]
    hashes = []
    for limit, num_lines in ((4096, 1), (64, 0), (None, 0)):
        monitor, folder = RecordingMonitor(), tmp_path / str(limit)
        store = record_store(target, folder, samples, monitor, max_length=limit)
        assert max(store.lengths) == 64
        hashes.append(file_hashes(folder))
        lines = [line for line in monitor.lines if "record.max_length: 4,096 is cut to 64" in line]
        assert len(lines) == num_lines
    assert hashes[0] == hashes[1] == hashes[2]


def test_passes_hold_conversations_side_by_side_or_in_padded_rows(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert target.padding_reason is None
    with recorded_shapes(target) as shapes:
        packed = record_store(target, tmp_path / "packed")
    assert packed.manifest.settings["side_by_side"] is True
    assert {rows for rows, _ in shapes} == {1}
    assert sum(tokens for _, tokens in shapes) == packed.manifest.counts.tokens
    monkeypatch.setitem(target.__dict__, "padding_reason", "mixes them")
    monitor = RecordingMonitor()
    with recorded_shapes(target) as shapes:
        padded = record_store(target, tmp_path / "padded", monitor=monitor)
    assert max(rows for rows, _ in shapes) > 1
    assert "right-padded rows: the target mixes them" in monitor.text
    assert "side_by_side" not in padded.manifest.settings
    for a, b in zip(packed, padded, strict=True):
        torch.testing.assert_close(a.features, b.features, atol=1e-5, rtol=1e-5)


def padded_tokens(lengths: list[int], batches: list[list[int]]) -> int:
    return sum(len(batch) * max(lengths[i] for i in batch) for batch in batches)


def conversation_lengths(seed: int, tokens: int = 32_768) -> list[int]:
    """Draw lengths of a shard's conversations as in public data sets."""
    generator = np.random.default_rng(seed)
    lengths: list[int] = []
    while True:
        length = int(np.clip(generator.lognormal(6.6, 0.7), 16, 4096))
        if sum(lengths) + length > tokens:
            return lengths
        lengths.append(length)


@pytest.mark.parametrize("seed", range(6))
def test_no_cut_of_the_sorted_records_costs_less(seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(20, 1500, 9).tolist()
    limit = 2500
    batches = cut_batches(lengths, limit, padded=True)
    order = [i for batch in batches for i in batch]
    assert sorted(order) == list(range(9))
    assert [lengths[i] for i in order] == sorted(lengths, reverse=True)
    costs = []
    for cuts in product([False, True], repeat=8):
        edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), 9]
        groups = [order[a:b] for a, b in pairwise(edges)]
        if all(len(group) == 1 or padded_tokens(lengths, [group]) <= limit for group in groups):
            costs.append(padded_tokens(lengths, groups) + PASS_TOKENS * len(groups))
    assert padded_tokens(lengths, batches) + PASS_TOKENS * len(batches) == min(costs)


@pytest.mark.parametrize("padded", [False, True])
def test_a_record_over_the_limit_has_an_early_pass_of_its_own(padded: bool) -> None:
    assert cut_batches([10, 5000, 10], 1000, padded=padded) == [[1], [0, 2]]
    assert cut_batches([5000, 1000, 6000], 1000, padded=padded) == [[2], [0], [1]]


@pytest.mark.parametrize("seed", range(20))
def test_records_side_by_side_fill_passes_evenly(seed: int) -> None:
    lengths = conversation_lengths(seed)
    batches = cut_batches(lengths, 8192, padded=False)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    sizes = [sum(lengths[i] for i in batch) for batch in batches]
    assert max(sizes) <= 8192
    assert max(sizes) - min(sizes) <= min(max(lengths), 512)
    assert len(sizes) <= -(-sum(lengths) // 8192) + 1
    assert max(lengths) in [lengths[i] for i in batches[0]]
