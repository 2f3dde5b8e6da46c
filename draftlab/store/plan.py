"""The plan of a recording: which samples are kept, in which shard, in which forward pass."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from draftlab.errors import UserError
from draftlab.progress import Monitor
from draftlab.store.manifest import Counts, Dropped, Manifest, Shard, StoreIdentity
from draftlab.store.settings import RecordBackend
from draftlab.store.store import Sample, predicted

PASS_TOKENS = 256
"""What a forward pass costs whatever is in it, in tokens: an H200 reads an 8B model's weights in
the time it computes 130, and small products run at part of its speed."""
SIDE_BY_SIDE = "side_by_side"
"""The setting of a plan whose passes hold their records side by side in one row. Without it they
are right-padded rows, as in all stores from before there was another way."""


def plan_store(
    samples: Sequence[Sample],
    identity: StoreIdentity,
    *,
    max_length: int,
    overlong: Literal["truncate", "skip"],
    shard_tokens: int,
    batch_tokens: int,
    target_dtype: str,
    not_finite: str,
    monitor: Monitor,
    backend: RecordBackend = "transformers",
    padded: bool,
) -> tuple[Manifest, list[Sample]]:
    """Plans a recording; the same arguments give the same plan.

    Args:
        padded: whether a pass is of right-padded rows, where its records could lie side by side.

    Returns:
        The manifest of an unfinished store, and the samples in it, truncated, in stored order.

    Raises:
        UserError: no samples, none left, equal ids, or a sample whose tokens and spans don't fit
            each other or the vocabulary.
    """
    if not samples:
        raise UserError("expected conversations to record, found none", do="check the data set")
    digest, seen = hashlib.sha256(), set()
    kept: list[Sample] = []
    overlong_count = empty_count = emptied = truncated = 0
    for sample in samples:
        _check(sample, identity.vocab_size)
        if sample.id in seen:
            raise UserError("expected unique sample ids, found one twice", where=f"{sample.id!r}")
        seen.add(sample.id)
        header = f"{sample.id!r} {sample.temperature!r} {len(sample.token_ids)}\n"
        digest.update(header.encode())
        digest.update(np.array([sample.token_ids, sample.spans], dtype="<i4").tobytes())
        too_long = len(sample.token_ids) > max_length
        if too_long and overlong == "skip":
            overlong_count += 1
            continue
        if too_long:
            cut = slice(0, max_length)
            sample = replace(sample, token_ids=sample.token_ids[cut], spans=sample.spans[cut])
        if not bool(predicted(torch.tensor(sample.spans)).any()):
            empty_count += 1
            emptied += too_long
            continue
        truncated += too_long
        kept.append(sample)
    dropped = Dropped(overlong=overlong_count, nothing_to_predict=empty_count)
    _say(monitor, len(samples), max_length, dropped, truncated, emptied)
    if not kept:
        raise UserError(
            f"expected conversations with an answer to predict, found none among {len(samples)}: "
            f"{dropped.overlong + emptied} longer than {max_length} tokens, "
            f"{dropped.nothing_to_predict - emptied} without an answer of two tokens",
            do="check the chat template's assistant spans (draftlab inspect) and max_length",
        )
    manifest = Manifest(
        complete=False,
        identity=identity,
        samples_sha256=digest.hexdigest(),
        settings={
            "max_length": max_length,
            "overlong": overlong,
            "shard_tokens": shard_tokens,
            "batch_tokens": batch_tokens,
            "target_dtype": target_dtype,
            "not_finite": not_finite,
            # Stores from before there was another have no such keys.
            **({} if backend == "transformers" else {"backend": backend}),
            **({} if padded else {SIDE_BY_SIDE: True}),
        },
        counts=Counts(
            records=len(kept),
            tokens=sum(len(s.token_ids) for s in kept),
            loss_tokens=sum(span > 0 for s in kept for span in s.spans),
        ),
        dropped=dropped,
        truncated=truncated,
        shards=_shards(kept, shard_tokens, batch_tokens, padded),
    )
    return manifest, kept


def refuse_other_plan(found: Manifest, plan: Manifest, where: Path) -> None:
    """Refuses to go on in a folder whose plan was made from something else.

    How records share passes may differ: whoever goes on follows the plan that is there.

    Raises:
        UserError: naming the identity's fields, the settings or the samples that differ.
    """
    found.identity.check(plan.identity, where)
    do = "name another store folder, or remove this one to record it again"
    settings = [
        f"{key}: expected {plan.settings.get(key)}, found {found.settings.get(key)}"
        for key in sorted((plan.settings.keys() | found.settings.keys()) - {SIDE_BY_SIDE})
        if plan.settings.get(key) != found.settings.get(key)
    ]
    if settings:
        lines = "\n  ".join(settings)
        raise UserError(
            f"this store was recorded with other settings:\n  {lines}", where=where, do=do
        )
    theirs, ours = (
        [pair for shard in m.shards for pair in zip(shard.ids, shard.lengths, strict=True)]
        for m in (found, plan)
    )
    if theirs == ours and found.samples_sha256 == plan.samples_sha256:
        return
    first = next((i for i, (a, b) in enumerate(zip(theirs, ours)) if a != b), None)  # noqa: B905
    if first is not None:
        (their_id, their_length), (our_id, our_length) = theirs[first], ours[first]
        what = (
            f"record {first}: expected {our_id!r} of {our_length} tokens, "
            f"found {their_id!r} of {their_length}"
        )
    elif len(theirs) != len(ours):
        what = f"expected {len(ours)} records, found {len(theirs)}"
    else:
        what = "the same ids and lengths, but other tokens, spans, temperatures or dropped samples"
    raise UserError(f"this store was recorded from other samples: {what}", where=where, do=do)


def _check(sample: Sample, vocab_size: int) -> None:
    where = f"sample {sample.id!r}"
    if len(sample.token_ids) != len(sample.spans):
        raise UserError(
            f"expected a span for each of {len(sample.token_ids)} tokens, found "
            f"{len(sample.spans)}",
            where=where,
        )
    if any(not 0 <= token < vocab_size for token in sample.token_ids):
        token = next(t for t in sample.token_ids if not 0 <= t < vocab_size)
        raise UserError(
            f"expected token ids below the target's {vocab_size}, found {token}",
            where=where,
            do="the tokenizer does not belong to this target, or has tokens added to it",
        )


def _say(
    monitor: Monitor,
    count: int,
    max_length: int,
    dropped: Dropped,
    truncated: int,
    emptied: int,
) -> None:
    if truncated:
        monitor.say(f"{truncated:,} of {count:,} samples truncated to {max_length:,} tokens")
    if dropped.overlong:
        monitor.say(
            f"{dropped.overlong:,} of {count:,} samples skipped: over {max_length:,} tokens"
        )
    if dropped.nothing_to_predict:
        monitor.say(
            f"{dropped.nothing_to_predict:,} of {count:,} samples dropped: no answer of two tokens "
            "or more, so nothing to predict"
            + (f"; {emptied:,} of them after a cut to {max_length:,} tokens" if emptied else "")
        )


def _shards(
    samples: Sequence[Sample], shard_tokens: int, batch_tokens: int, padded: bool
) -> list[Shard]:
    """Consecutive samples, as many to a shard as fit."""
    groups: list[list[Sample]] = []
    filled = shard_tokens
    for sample in samples:
        length = len(sample.token_ids)
        if filled + length > shard_tokens:
            groups.append([])
            filled = 0
        groups[-1].append(sample)
        filled += length
    return [
        Shard(
            file=f"shard-{number:05d}.safetensors",
            ids=[s.id for s in group],
            lengths=[len(s.token_ids) for s in group],
            temperatures=[s.temperature for s in group],
            batches=cut_batches([len(s.token_ids) for s in group], batch_tokens, padded=padded),
        )
        for number, group in enumerate(groups)
    ]


def cut_batches(lengths: Sequence[int], batch_tokens: int, *, padded: bool) -> list[list[int]]:
    """Which of some records share a pass of at most `batch_tokens`; a longer record goes alone.

    The pass with the longest record is first: what does not fit the device fails at once.

    Args:
        padded: whether every record of a pass takes as many tokens as its longest.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    if padded:
        return _cut_padded(lengths, order, batch_tokens)
    alone = [[i] for i in order if lengths[i] > batch_tokens]
    rest = order[len(alone) :]
    large = sum(2 * lengths[i] > batch_tokens for i in rest)  # no two of them share a pass
    passes = max(large, -(-sum(lengths[i] for i in rest) // batch_tokens))
    while rest and (shares := _dealt(lengths, rest, passes, batch_tokens)) is None:
        passes += 1
    return alone + (shares if rest else [])


def _dealt(
    lengths: Sequence[int], order: Sequence[int], passes: int, batch_tokens: int
) -> list[list[int]] | None:
    """Records, longest first, each to the emptiest of `passes`; None: it has no room for one."""
    shares: list[list[int]] = [[] for _ in range(passes)]
    filled = [(0, number) for number in range(passes)]
    for i in order:
        tokens, emptiest = filled[0]
        if tokens + lengths[i] > batch_tokens:
            return None
        heapq.heapreplace(filled, (tokens + lengths[i], emptiest))
        shares[emptiest].append(i)
    return shares


def _cut_padded(lengths: Sequence[int], order: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Cuts records, in their order, into the batches that cost least.

    A batch costs its padded tokens and a pass of its own, in which the target's weights are read.
    """
    cost, begin = [0], [0]  # of the best cut of the first e records; where its last batch begins
    for end in range(1, len(order) + 1):
        best = None
        for start in range(end - 1, -1, -1):
            padded = (end - start) * lengths[order[start]]
            if padded > batch_tokens and end - start > 1:
                break
            found = cost[start] + padded + PASS_TOKENS
            best = min(best or (found, start), (found, start))
        cost.append(best[0])
        begin.append(best[1])
    batches, end = [], len(order)
    while end:
        batches.append(order[begin[end] : end])
        end = begin[end]
    return batches[::-1]
