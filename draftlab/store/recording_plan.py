"""The plan of a recording: which samples are recorded, in which shard and which forward pass."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from draftlab.errors import UserError
from draftlab.progress import Monitor
from draftlab.store.manifest import (
    Counts,
    Dropped,
    Manifest,
    Shard,
    StoreIdentity,
    StoreWindow,
    template_arguments_setting,
)
from draftlab.store.prompt_split import hold_out
from draftlab.store.record_index import RecordIndex
from draftlab.store.sample_table import Sample, SampleTable, Selection
from draftlab.store.settings import RecordSettings
from draftlab.target_model.metadata import TargetMetadata

if TYPE_CHECKING:
    from draftlab.target_model.model import Target

PASS_TOKENS = 256
"""Fixed cost of a forward pass in tokens: an H200 reads an 8B model's weights in the time in which
it computes 130 tokens, and small matrix products run below its full speed."""
SIDE_BY_SIDE = "side_by_side"
"""Setting of a plan whose passes hold their records side by side in one packed row. Plans without
it have right-padded rows."""


class HeldOut(NamedTuple):
    """What decides the held-out records: the share of validation, and the training's seed."""

    share: float
    seed: int


def plan_recording(
    target: Target | TargetMetadata,
    samples: Sequence[Sample],
    settings: RecordSettings,
    identity: StoreIdentity,
    *,
    monitor: Monitor,
    held_out: HeldOut | None = None,
) -> tuple[Manifest, Selection]:
    """Plan a recording. The same arguments give the same plan.

    With a window the held-out records, which `held_out` decides, come first, in shards of their
    own.

    Returns:
        The manifest of an incomplete store, and its samples, truncated, in stored order.

    Raises:
        UserError: there are no samples with an answer; two have the same id; or tokens of
            one are not of the vocabulary.
    """
    padding_reason = target.padding_reason
    if padding_reason is not None:
        monitor.say(f"forward passes are of right-padded rows: the target {padding_reason}")
    padded, positions = padding_reason is not None, target.max_length
    max_length = settings.length_limit(positions)
    if settings.max_length is not None and settings.max_length > positions:
        monitor.say(
            f"record.max_length: {settings.max_length:,} is cut to {positions:,}, the target's "
            "number of positions"
        )
    table = SampleTable.of(samples)
    _check_samples(table, identity.vocab_size)
    too_long = table.lengths > max_length
    unanswered = table.first_label >= np.minimum(table.lengths, max_length)
    rows, num_held_out = np.flatnonzero(~unanswered), 0
    if settings.window is None:
        held_out = None
    elif held_out is None:
        raise ValueError("a plan with a window needs to know which records are held out")
    if held_out is not None and len(rows):
        training, validation = hold_out([table.ids[row] for row in rows], *held_out)
        rows, num_held_out = rows[np.concatenate([validation, training])], len(validation)
    recorded = Selection(table, rows, max_length)
    truncated = rows[too_long[rows]]
    num_unanswered, by_cut = int(unanswered.sum()), int((unanswered & too_long).sum())
    loss_tokens = int(table.loss_tokens[rows[~too_long[rows]]].sum())
    loss_tokens += sum(np.count_nonzero(table[row].spans[:max_length]) for row in truncated)
    lengths = np.minimum(table.lengths[rows], max_length)
    no_answer = "dropped: they have no answer of two tokens or more, so there is nothing to predict"
    if by_cut:
        no_answer += f"; {by_cut:,} of them after truncation"
    for count, text in (
        (len(truncated), f"truncated to {max_length:,} tokens"),
        (num_unanswered, no_answer),
    ):
        if count:
            monitor.say(f"{count:,} of {len(samples):,} samples {text}")
    if not recorded:
        raise UserError(
            f"expected conversations with an answer to predict, found none among {len(samples)}: "
            f"{by_cut} longer than {max_length} tokens, "
            f"{num_unanswered - by_cut} without an answer of two tokens",
            do="check the chat template's assistant spans (draftlab inspect) and max_length",
        )
    manifest = Manifest.plan(
        _index(recorded, lengths, settings.shard_tokens, num_held_out),
        identity=identity,
        samples_sha256=table.sha256,
        settings={
            "max_length": max_length,
            "shard_tokens": settings.shard_tokens,
            "batch_tokens": settings.batch_tokens,
            "target_dtype": str(target.dtype).removeprefix("torch."),
            **({} if settings.backend == "transformers" else {"backend": settings.backend}),
            **({} if padded else {SIDE_BY_SIDE: True}),
            **template_arguments_setting(table.modes),
        },
        counts=Counts(records=len(recorded), tokens=int(lengths.sum()), loss_tokens=loss_tokens),
        dropped=Dropped(nothing_to_predict=num_unanswered),
        truncated=len(truncated),
    )
    if settings.window is not None and held_out is not None:
        ends = manifest.index.shard_ends
        first = int(np.searchsorted(ends, num_held_out)) + 1 if num_held_out else 0
        window = StoreWindow(settings.window, settings.rolls, *held_out, num_held_out, first)
        check_window(window, manifest.planned_sizes[first:])
        manifest.settings |= window.settings()
    return manifest, recorded


def check_window(window: StoreWindow, sizes: np.ndarray) -> None:
    """Raise a `UserError` if a window holds fewer than four of the largest shards that come and
    go, whose bytes are `sizes`, int64, and not all of them.
    """
    largest = int(sizes.max(initial=0))
    if window.size < 4 * largest and sizes.sum() > window.size // 2:
        raise UserError(
            f"expected a window of at least four shards, {4 * largest:,} bytes, found "
            f"{window.size:,}",
            where="record.window",
            do="raise it, or lower record.shard_tokens",
        )


def check_same_recording(actual: Manifest, plan: Manifest, where: Path) -> None:
    """Check that a folder's manifest is one of the planned recording, so that it can be continued.

    Whether rows are padded may differ: a recording is continued as its own plan has it.

    Raises:
        UserError: the fields of the identity, the settings or the samples that differ.
    """
    actual.identity.check(plan.identity, where)
    do = "name another store folder, or remove this one to record it again"
    settings = [
        f"{key}: expected {plan.settings.get(key)}, found {actual.settings.get(key)}"
        for key in sorted((plan.settings.keys() | actual.settings.keys()) - {SIDE_BY_SIDE})
        if plan.settings.get(key) != actual.settings.get(key)
    ]
    if settings:
        lines = "\n  ".join(settings)
        raise UserError(
            f"this store was recorded with other settings:\n  {lines}", where=where, do=do
        )
    one, other = actual.index, plan.index
    if one.same_records(other) and actual.samples_sha256 == plan.samples_sha256:
        return
    what = "the same ids and lengths, but other tokens, spans, temperatures or dropped samples"
    if len(one.lengths) != len(other.lengths):
        what = f"expected {len(other.lengths)} records, found {len(one.lengths)}"
    columns = (one.ids, one.lengths, other.ids, other.lengths)
    for number, (id_, length, planned_id, planned_length) in enumerate(zip(*columns, strict=False)):
        if (id_, length) != (planned_id, planned_length):
            what = (
                f"record {number}: expected {planned_id!r} of {planned_length} tokens, "
                f"found {id_!r} of {length}"
            )
            break
    raise UserError(f"this store was recorded from other samples: {what}", where=where, do=do)


def _check_samples(table: SampleTable, vocab_size: int) -> None:
    bad = np.flatnonzero((table.lowest < 0) | (table.highest >= vocab_size))
    if len(bad):
        token = table.lowest[bad[0]] or table.highest[bad[0]]
        raise UserError(
            f"expected token ids below the target's {vocab_size}, found {token}",
            where=f"sample {table.ids[bad[0]]!r}",
            do="the tokenizer does not belong to this target, or has tokens added to it",
        )
    if len(set(table.ids)) < len(table):
        id_ = Counter(table.ids).most_common(1)[0][0]
        raise UserError(
            "expected unique sample ids, found one twice",
            where=f"{id_!r}",
            do="rename one of the two prompts and make the answers again",
        )


def _index(
    selection: Selection, lengths: np.ndarray, shard_tokens: int, num_held_out: int
) -> RecordIndex:
    """Return the index; no shard has both held-out records, which are the first, and others."""
    ids, rows = selection.table.ids, selection.rows
    groups = [
        len(group)
        for part in (lengths[:num_held_out], lengths[num_held_out:])
        for group in group_consecutive(part.tolist(), shard_tokens)
    ]
    temperatures = selection.table.temperatures[rows]
    return RecordIndex.of([ids[row] for row in rows.tolist()], lengths, temperatures, groups)


def group_consecutive(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Group consecutive items into as few groups of at most `max_tokens` as this order allows.

    A longer item has a group of its own. Groups are lists of indices.
    """
    groups: list[list[int]] = []
    group_tokens = max_tokens
    for index, length in enumerate(lengths):
        if group_tokens + length > max_tokens:
            groups.append([])
            group_tokens = 0
        groups[-1].append(index)
        group_tokens += length
    return groups


def batches_of(plan: Manifest, shard: Shard) -> list[list[int]]:
    """Return which of a shard's records share a forward pass, which decides the last bits."""
    settings = plan.settings
    padded = not settings.get(SIDE_BY_SIDE, False)
    return cut_batches(shard.lengths, settings["batch_tokens"], padded=padded)


def cut_batches(lengths: Sequence[int], batch_tokens: int, *, padded: bool) -> list[list[int]]:
    """Distribute records to forward passes of at most `batch_tokens`; return the numbers of each
    pass.

    A longer record has a pass of its own. The pass with the longest record comes first, so that
    what does not fit into the device's memory fails at once. In padded passes every record takes as
    many tokens as the longest.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    if padded:
        return _cut_padded(lengths, order, batch_tokens)
    alone = [[i] for i in order if lengths[i] > batch_tokens]
    rest = order[len(alone) :]
    if not rest:
        return alone
    large = sum(2 * lengths[i] > batch_tokens for i in rest)  # no two of them share a pass
    passes = max(large, -(-sum(lengths[i] for i in rest) // batch_tokens))
    while (batches := _fill_passes(lengths, rest, passes, batch_tokens)) is None:
        passes += 1
    return alone + batches


def _fill_passes(
    lengths: Sequence[int], order: Sequence[int], passes: int, batch_tokens: int
) -> list[list[int]] | None:
    """Assign each record, longest first, to the emptiest pass; return None if one does not fit."""
    batches: list[list[int]] = [[] for _ in range(passes)]
    heap = [(0, number) for number in range(passes)]  # tokens of each pass
    for i in order:
        tokens, emptiest = heap[0]
        if tokens + lengths[i] > batch_tokens:
            return None
        heapq.heapreplace(heap, (tokens + lengths[i], emptiest))
        batches[emptiest].append(i)
    return batches


def _cut_padded(lengths: Sequence[int], order: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Cut records, in their order, into the batches with the least cost.

    A batch costs its padded tokens and PASS_TOKENS.
    """
    cost, begin = [0], [0]  # of the best cut of the first e records; where its last batch begins
    for end in range(1, len(order) + 1):
        best = None
        for start in range(end - 1, -1, -1):
            padded_tokens = (end - start) * lengths[order[start]]
            if padded_tokens > batch_tokens and end - start > 1:
                break
            candidate = (cost[start] + padded_tokens + PASS_TOKENS, start)
            best = min(best or candidate, candidate)
        cost.append(best[0])
        begin.append(best[1])
    batches, end = [], len(order)
    while end:
        batches.append(order[begin[end] : end])
        end = begin[end]
    return batches[::-1]
