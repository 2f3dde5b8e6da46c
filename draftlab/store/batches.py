"""Groups of records: those that share a shard, and those that share a forward pass."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

PASS_TOKENS = 256
"""Fixed cost of a forward pass in tokens: an H200 reads an 8B model's weights in the time in which
it computes 130 tokens, and small matrix products run below its full speed."""


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
