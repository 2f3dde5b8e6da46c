"""Passes of a target over texts of different lengths, in chunks, with a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from draftlab.kernels.paged_attention import slot_mapping
from draftlab.target_model.model import DecodePath, Target

PassCache = Callable[[Tensor], Any]
"""Takes the positions [B, M] of a pass; returns the cache argument of `states`."""


def row_cache(target: Target, rows: Sequence[int], max_length: int) -> PassCache:
    """Return a cache of rows, of which those with these numbers are used."""
    cache = target.new_cache(max(rows) + 1, max_length)
    return lambda positions: cache.at_rows(rows, positions, int(positions.max()) + 1)


def paged_cache(target: Target, table: Tensor, block_size: int) -> PassCache:
    """Return a cache of the blocks in a table, int32 [B, N]."""
    cache = target.new_paged_cache(int(table.max()) + 1, block_size)
    return lambda positions: cache.at(table, positions, slot_mapping(table, positions, block_size))


def run_ragged(
    path: DecodePath,
    cache: PassCache,
    texts: Sequence[Tensor],
    passes: Sequence[Sequence[int]],
    boundaries: tuple[int, ...] = (),
) -> list[tuple[Tensor, Tensor]]:
    """Return features [T, F] and last states [T, H] of each text.

    Args:
        passes: for each pass, the number of tokens of each text; the rest is padding.
    """
    done = [0] * len(texts)
    states: list[list[tuple[Tensor, Tensor]]] = [[] for _ in texts]
    for sizes in passes:
        ids = torch.zeros(len(texts), max(sizes), dtype=torch.int64)
        positions = torch.full_like(ids, -1)
        for row, n in enumerate(sizes):
            ids[row, :n] = texts[row][done[row] : done[row] + n]
            positions[row, :n] = torch.arange(done[row], done[row] + n)
            done[row] += n
        output = path.states(ids, boundaries, positions=positions, cache=cache(positions))
        for row, n in enumerate(sizes):
            states[row].append((output.features[row, :n], output.last[row, :n]))
    return [tuple(torch.cat(each) for each in zip(*parts, strict=True)) for parts in states]
