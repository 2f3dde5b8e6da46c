"""Batches of a recording: as cheap as any cut of the sorted records can be."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from draftlab.data.plan import PASS_TOKENS, cut_batches


def cost(lengths: list[int], batches: list[list[int]]) -> int:
    return sum(len(b) * max(lengths[i] for i in b) + PASS_TOKENS for b in batches)


@pytest.mark.parametrize("seed", range(6))
def test_no_cut_of_the_sorted_records_is_cheaper(seed: int) -> None:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(20, 1500, 9).tolist()
    limit = 2500
    found = cut_batches(lengths, limit)
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


def test_a_record_over_the_limit_goes_alone_and_first() -> None:
    assert cut_batches([10, 5000, 10], 1000) == [[1], [0, 2]]


def test_padding_is_a_few_percent_of_ragged_conversations() -> None:
    generator = np.random.default_rng(0)
    lengths = np.clip(generator.lognormal(6.6, 0.7, 40), 30, 4096).astype(int).tolist()
    found = cut_batches(lengths, 8192)
    padded = sum(len(b) * max(lengths[i] for i in b) for b in found)
    assert sum(lengths) / padded > 0.93
