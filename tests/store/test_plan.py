"""Batches of a recording: full without padding; with it, as cheap as any cut of sorted records."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from draftlab.store.plan import PASS_TOKENS, cut_batches


def cost(lengths: list[int], batches: list[list[int]]) -> int:
    return sum(len(b) * max(lengths[i] for i in b) + PASS_TOKENS for b in batches)


@pytest.mark.parametrize("seed", range(6))
def test_no_cut_of_the_sorted_records_is_cheaper(seed: int) -> None:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(20, 1500, 9).tolist()
    limit = 2500
    found = cut_batches(lengths, limit, padded=True)
    assert sorted(i for batch in found for i in batch) == list(range(9))
    order = [i for batch in found for i in batch]
    assert [lengths[i] for i in order] == sorted(lengths, reverse=True)
    costs = []
    for cuts in product([False, True], repeat=8):
        batches = [[order[0]]]
        for index, cut in zip(order[1:], cuts, strict=True):
            if cut:
                batches.append([])
            batches[-1].append(index)
        if all(len(b) == 1 or len(b) * max(lengths[i] for i in b) <= limit for b in batches):
            costs.append(cost(lengths, batches))
    assert cost(lengths, found) == min(costs)


@pytest.mark.parametrize("padded", [False, True])
def test_a_record_over_the_limit_goes_alone_and_first(padded: bool) -> None:
    assert cut_batches([10, 5000, 10], 1000, padded=padded) == [[1], [0, 2]]
    assert cut_batches([5000, 1000, 6000], 1000, padded=padded) == [[2], [0], [1]]


def test_padding_is_a_few_percent_of_ragged_conversations() -> None:
    generator = np.random.default_rng(0)
    lengths = np.clip(generator.lognormal(6.6, 0.7, 40), 30, 4096).astype(int).tolist()
    found = cut_batches(lengths, 8192, padded=True)
    padded = sum(len(b) * max(lengths[i] for i in b) for b in found)
    assert sum(lengths) / padded > 0.93


def ragged(seed: int, tokens: int = 32_768) -> list[int]:
    """Lengths of a shard's conversations, as public sets have them."""
    generator = np.random.default_rng(seed)
    lengths: list[int] = []
    while True:
        length = int(np.clip(generator.lognormal(6.6, 0.7), 16, 4096))
        if sum(lengths) + length > tokens:
            return lengths
        lengths.append(length)


@pytest.mark.parametrize("seed", range(20))
def test_records_side_by_side_fill_equal_passes(seed: int) -> None:
    lengths = ragged(seed)
    found = cut_batches(lengths, 8192, padded=False)
    assert sorted(i for batch in found for i in batch) == list(range(len(lengths)))
    sizes = [sum(lengths[i] for i in batch) for batch in found]
    assert max(sizes) <= 8192
    assert max(sizes) - min(sizes) <= min(max(lengths), 512)
    assert len(sizes) <= -(-sum(lengths) // 8192) + 1
    assert max(lengths) in [lengths[i] for i in found[0]]


def test_what_fills_passes_exactly_takes_no_more_of_them() -> None:
    assert cut_batches([3, 5, 5, 3], 8, padded=False) == [[1, 0], [2, 3]]
    assert cut_batches([4], 8, padded=False) == [[0]]
    assert cut_batches([8, 8], 8, padded=False) == [[0], [1]]
    # Two of three would not fit: each has a pass of its own.
    assert cut_batches([5, 5, 5], 8, padded=False) == [[0], [1], [2]]
