"""The order of records in training, and which records share a row (docs/methods.md §1)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from itertools import chain, count, islice

import numpy as np

from draftlab.errors import UserError

OPEN_ROWS = 64
"""Rows that still accept records. More rows waste less padding, but mix records less well."""


def check_row_tokens(lengths: Sequence[int], row_tokens: int) -> None:
    """Raise a `UserError` if a record does not fit a row."""
    longest = max(lengths, default=0)
    if longest > row_tokens:
        raise UserError(
            f"expected records of at most train.row_tokens = {row_tokens} tokens, found one of "
            f"{longest}",
            where="train.row_tokens",
            do="raise train.row_tokens or lower record.max_length",
        )


def epoch_rows(
    lengths: Sequence[int], row_tokens: int, *, seed: int, epoch: int
) -> list[list[int]]:
    """Assign every record to a row of at most `row_tokens`, in an order fixed by seed and epoch.

    Records come in random order and go into the fullest open row that has room; a new row closes
    the fullest of `OPEN_ROWS`. The rows are shuffled at the end, since the last rows are emptier.
    """
    check_row_tokens(lengths, row_tokens)
    generator = np.random.default_rng([seed, epoch])
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (free tokens, row), ascending
    for record in generator.permutation(len(lengths)).tolist():
        fullest = bisect_left(open_rows, (lengths[record], 0))
        if fullest < len(open_rows):
            free, row = open_rows.pop(fullest)
        else:
            free, row = row_tokens, len(rows)
            rows.append([])
            if len(open_rows) == OPEN_ROWS:
                del open_rows[0]
        rows[row].append(record)
        insort(open_rows, (free - lengths[record], row))
    return [rows[i] for i in generator.permutation(len(rows))]


def batches(
    lengths: Sequence[int], row_tokens: int, batch_rows: int, *, seed: int
) -> Iterator[list[list[int]]]:
    """Yield the `batch_rows` rows of record indices of each optimizer step, without end.

    Every epoch has each record once. A step that an epoch's last rows do not fill continues with
    the first rows of the next epoch, since few rows would move the weights as far as many.
    """
    epochs = (epoch_rows(lengths, row_tokens, seed=seed, epoch=epoch) for epoch in count())
    rows = chain.from_iterable(epochs)
    while True:
        yield list(islice(rows, batch_rows))
