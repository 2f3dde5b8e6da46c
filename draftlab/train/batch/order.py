"""In which order training meets the records, and which of them share a row (methods §1)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

import numpy as np

from draftlab.errors import UserError

OPEN_ROWS = 64
"""Rows that still take records: more fill rows better, fewer keep neighbours from one draw."""


def epoch_rows(
    lengths: Sequence[int], row_tokens: int, *, seed: int, epoch: int
) -> list[list[int]]:
    """Assigns every record to a row of at most `row_tokens`, in an order fixed by seed and epoch.

    Records come in random order and go into the fullest open row that has room; a new row closes
    the fullest of `OPEN_ROWS`. The rows are then shuffled, so that late, emptier rows do not
    end up together.
    """
    longest = max(lengths)
    if longest > row_tokens:
        raise UserError(
            f"expected records of at most train.row_tokens = {row_tokens} tokens, found one of "
            f"{longest}",
            do="raise train.row_tokens or lower record.max_length",
        )
    generator = np.random.default_rng([seed, epoch])
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, row), ascending
    for record in generator.permutation(len(lengths)).tolist():
        at = bisect_left(room, (lengths[record], 0))
        if at < len(room):
            left, row = room.pop(at)
        else:
            left, row = row_tokens, len(rows)
            rows.append([])
            if len(room) == OPEN_ROWS:
                del room[0]
        rows[row].append(record)
        insort(room, (left - lengths[record], row))
    return [rows[i] for i in generator.permutation(len(rows))]


def batches(
    lengths: Sequence[int], row_tokens: int, batch_rows: int, *, seed: int
) -> Iterator[list[list[int]]]:
    """Endless optimizer steps, each a list of rows of record indices; no record is left out."""
    epoch = 0
    while True:
        rows = epoch_rows(lengths, row_tokens, seed=seed, epoch=epoch)
        yield from (rows[i : i + batch_rows] for i in range(0, len(rows), batch_rows))
        epoch += 1
