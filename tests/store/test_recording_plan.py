"""Batches of a recording: without padding they are full, with padding they cost the least."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest

from draftlab.store.recording_plan import PASS_TOKENS, cut_batches


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


@pytest.mark.parametrize(
    ("lengths", "batches"),
    [
        ([3, 5, 5, 3], [[1, 0], [2, 3]]),
        ([4], [[0]]),
        ([8, 8], [[0], [1]]),
        ([5, 5, 5], [[0], [1], [2]]),  # no two fit in one pass
    ],
)
def test_records_take_no_more_passes_than_they_fill(
    lengths: list[int], batches: list[list[int]]
) -> None:
    assert cut_batches(lengths, 8, padded=False) == batches
