"""The plan of a recording: which samples are recorded, in which shard and which forward pass."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from draftlab.errors import UserError
from draftlab.progress import Monitor
from draftlab.store.manifest import Counts, Dropped, Manifest, Shard, StoreIdentity
from draftlab.store.settings import RecordSettings
from draftlab.store.store import Sample, prediction_mask

PASS_TOKENS = 256
"""Fixed cost of a forward pass in tokens: an H200 reads an 8B model's weights in the time in which
it computes 130 tokens, and small matrix products run below its full speed."""
SIDE_BY_SIDE = "side_by_side"
"""Setting of a plan whose passes hold their records side by side in one packed row. Plans without
it, such as those of older stores, have right-padded rows."""


def plan_store(
    samples: Sequence[Sample],
    identity: StoreIdentity,
    settings: RecordSettings,
    *,
    max_length: int,
    target_dtype: str,
    padded: bool,
    monitor: Monitor,
) -> tuple[Manifest, list[Sample]]:
    """Plan a recording. The same arguments give the same plan.

    Args:
        max_length: maximum number of tokens of a sample; it replaces the one of the settings.
        padded: whether passes are right-padded rows, instead of records side by side in one row.

    Returns:
        The manifest of an incomplete store, and its samples, truncated, in stored order.

    Raises:
        UserError: there are no samples, or none with an answer; two have the same id; or the tokens
            of one do not match its spans or the vocabulary.
    """
    if not samples:
        raise UserError("expected conversations to record, found none", do="check the data set")
    digest, ids = hashlib.sha256(), set()
    recorded: list[Sample] = []
    num_overlong = num_unanswered = num_unanswered_by_cut = num_truncated = 0
    for sample in samples:
        _check_sample(sample, identity.vocab_size)
        if sample.id in ids:
            raise UserError("expected unique sample ids, found one twice", where=f"{sample.id!r}")
        ids.add(sample.id)
        header = f"{sample.id!r} {sample.temperature!r} {len(sample.token_ids)}\n"
        digest.update(header.encode())
        digest.update(np.array([sample.token_ids, sample.spans], dtype="<i4").tobytes())
        too_long = len(sample.token_ids) > max_length
        if too_long and settings.overlong == "skip":
            num_overlong += 1
            continue
        if too_long:
            token_ids, spans = sample.token_ids[:max_length], sample.spans[:max_length]
            sample = replace(sample, token_ids=token_ids, spans=spans)
        if not bool(prediction_mask(torch.tensor(sample.spans)).any()):
            num_unanswered += 1
            num_unanswered_by_cut += too_long
            continue
        num_truncated += too_long
        recorded.append(sample)
    no_answer = "dropped: they have no answer of two tokens or more, so there is nothing to predict"
    if num_unanswered_by_cut:
        no_answer += f"; {num_unanswered_by_cut:,} of them after truncation"
    for count, text in (
        (num_truncated, f"truncated to {max_length:,} tokens"),
        (num_overlong, f"skipped: they have more than {max_length:,} tokens"),
        (num_unanswered, no_answer),
    ):
        if count:
            monitor.say(f"{count:,} of {len(samples):,} samples {text}")
    if not recorded:
        raise UserError(
            f"expected conversations with an answer to predict, found none among {len(samples)}: "
            f"{num_overlong + num_unanswered_by_cut} longer than {max_length} tokens, "
            f"{num_unanswered - num_unanswered_by_cut} without an answer of two tokens",
            do="check the chat template's assistant spans (draftlab inspect) and max_length",
        )
    manifest = Manifest(
        complete=False,
        identity=identity,
        samples_sha256=digest.hexdigest(),
        settings={
            "max_length": max_length,
            "overlong": settings.overlong,
            "shard_tokens": settings.shard_tokens,
            "batch_tokens": settings.batch_tokens,
            "target_dtype": target_dtype,
            "not_finite": settings.not_finite,
            # Older stores have none of these keys.
            **({} if settings.backend == "transformers" else {"backend": settings.backend}),
            **({} if padded else {SIDE_BY_SIDE: True}),
        },
        counts=Counts(
            records=len(recorded),
            tokens=sum(len(sample.token_ids) for sample in recorded),
            loss_tokens=sum(span > 0 for sample in recorded for span in sample.spans),
        ),
        dropped=Dropped(overlong=num_overlong, nothing_to_predict=num_unanswered),
        truncated=num_truncated,
        shards=_shards(recorded, settings, padded),
    )
    return manifest, recorded


def check_same_recording(actual: Manifest, plan: Manifest, where: Path) -> None:
    """Check that a folder's manifest is one of the planned recording, so that it can be continued.

    The batches may differ: a recording is continued with the batches of its own plan.

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
    actual_records, planned_records = (
        [record for shard in m.shards for record in zip(shard.ids, shard.lengths, strict=True)]
        for m in (actual, plan)
    )
    if actual_records == planned_records and actual.samples_sha256 == plan.samples_sha256:
        return
    what = "the same ids and lengths, but other tokens, spans, temperatures or dropped samples"
    if len(actual_records) != len(planned_records):
        what = f"expected {len(planned_records)} records, found {len(actual_records)}"
    pairs = zip(actual_records, planned_records, strict=False)
    for number, ((id_, length), (planned_id, planned_length)) in enumerate(pairs):
        if (id_, length) != (planned_id, planned_length):
            what = (
                f"record {number}: expected {planned_id!r} of {planned_length} tokens, "
                f"found {id_!r} of {length}"
            )
            break
    raise UserError(f"this store was recorded from other samples: {what}", where=where, do=do)


def _check_sample(sample: Sample, vocab_size: int) -> None:
    where = f"sample {sample.id!r}"
    if len(sample.token_ids) != len(sample.spans):
        raise UserError(
            f"expected a span for each of {len(sample.token_ids)} tokens, found "
            f"{len(sample.spans)}",
            where=where,
        )
    for token in sample.token_ids:
        if not 0 <= token < vocab_size:
            raise UserError(
                f"expected token ids below the target's {vocab_size}, found {token}",
                where=where,
                do="the tokenizer does not belong to this target, or has tokens added to it",
            )


def _shards(samples: Sequence[Sample], settings: RecordSettings, padded: bool) -> list[Shard]:
    lengths = [len(sample.token_ids) for sample in samples]
    return [
        Shard(
            file=f"shard-{number:05d}.safetensors",
            ids=[samples[i].id for i in group],
            lengths=[lengths[i] for i in group],
            temperatures=[samples[i].temperature for i in group],
            batches=cut_batches([lengths[i] for i in group], settings.batch_tokens, padded=padded),
        )
        for number, group in enumerate(group_consecutive(lengths, settings.shard_tokens))
    ]


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


def cut_batches(lengths: Sequence[int], batch_tokens: int, *, padded: bool) -> list[list[int]]:
    """Distribute records to forward passes of at most `batch_tokens`.

    A longer record has a pass of its own. The pass with the longest record comes first, so that
    what does not fit into the device's memory fails at once.

    Args:
        padded: whether every record of a pass takes as many tokens as its longest.

    Returns:
        The record numbers of each pass.
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
