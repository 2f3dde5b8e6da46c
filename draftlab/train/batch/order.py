"""The order of records in training, and which records share a row (docs/methods.md §1)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from itertools import count, islice

import numpy as np

from draftlab.errors import UserError

OPEN_ROWS = 64
"""Rows that still accept records. More rows waste less padding, but mix records less well."""
_CHUNK = 1 << 18
"""Records that are Python objects at a time: 100 M would take gigabytes."""


class EpochRows:
    """The rows of an epoch: record numbers row by row, int64 [n], and their ends, int64 [rows]."""

    def __init__(self, records: np.ndarray, ends: np.ndarray) -> None:
        self.records, self.ends = records, ends

    def __len__(self) -> int:
        return len(self.ends)

    def __iter__(self) -> Iterator[list[int]]:
        return self.after(0)

    def after(self, first: int) -> Iterator[list[int]]:
        """Yield the record numbers of each row, from row `first` on."""
        for row in range(first, len(self.ends)):
            start = self.ends[row - 1] if row else 0
            yield self.records[start : self.ends[row]].tolist()


def check_row_tokens(lengths: Sequence[int] | np.ndarray, row_tokens: int) -> None:
    """Raise a `UserError` if a record does not fit a row."""
    longest = int(np.asarray(lengths, dtype=np.int64).max(initial=0))
    if longest > row_tokens:
        raise UserError(
            f"expected records of at most train.row_tokens = {row_tokens} tokens, found one of "
            f"{longest}",
            where="train.row_tokens",
            do="raise train.row_tokens or lower record.max_length",
        )


def epoch_rows(
    lengths: Sequence[int] | np.ndarray, row_tokens: int, *, seed: int, epoch: int
) -> EpochRows:
    """Assign every record to a row of at most `row_tokens`, in an order fixed by seed and epoch.

    Records come in random order and go into the fullest open row that has room; a new row closes
    the fullest of `OPEN_ROWS`. The rows are shuffled at the end, since the last rows are emptier.
    """
    lengths = np.asarray(lengths)
    check_row_tokens(lengths, row_tokens)
    generator, number = np.random.default_rng([seed, epoch]), len(lengths)
    order = generator.permutation(np.arange(number, dtype=np.int32 if number < 2**31 else np.int64))
    rows = _assign_rows(lengths, order, row_tokens)
    sizes = np.bincount(rows)
    shuffled = generator.permutation(len(sizes))
    places = np.empty_like(shuffled)
    places[shuffled] = np.arange(len(sizes))
    # A row's records stay in their order: a place in the order is the lower part of the sorted key.
    bits = number.bit_length()
    keys = places[rows]
    keys <<= bits
    keys |= np.arange(number)
    keys.sort()
    keys &= (1 << bits) - 1
    return EpochRows(order[keys], sizes[shuffled].cumsum())


def _assign_rows(lengths: np.ndarray, order: np.ndarray, row_tokens: int) -> np.ndarray:
    """Return the row of each record, for records in `order`: int64 [n]."""
    rows = np.empty(len(order), np.int64)
    bits, mask = 40, (1 << 40) - 1
    num_rows = 0
    open_rows: list[int] = []  # free tokens << bits | row, ascending: one number compares fast
    for start in range(0, len(order), _CHUNK):
        chunk, assigned = order[start : start + _CHUNK], []
        for length in (lengths[chunk].astype(np.int64) << bits).tolist():
            fullest = bisect_left(open_rows, length)
            if fullest < len(open_rows):
                free_and_row = open_rows.pop(fullest)
            else:
                free_and_row = row_tokens << bits | num_rows
                num_rows += 1
                if len(open_rows) == OPEN_ROWS:
                    del open_rows[0]
            assigned.append(free_and_row & mask)
            insort(open_rows, free_and_row - length)
        rows[start : start + _CHUNK] = assigned
    return rows


def batches(
    lengths: Sequence[int] | np.ndarray,
    row_tokens: int,
    batch_rows: int,
    *,
    seed: int,
    first: int = 0,
) -> Iterator[list[list[int]]]:
    """Yield the rows of record indices of each optimizer step, from `first` on, without end.

    Every epoch has each record once. A step that an epoch's last rows do not fill continues with
    the first rows of the next epoch, since few rows would move the weights as far as many.
    """
    rows = _rows(lengths, row_tokens, seed, first * batch_rows)
    while True:
        yield list(islice(rows, batch_rows))


def _rows(
    lengths: Sequence[int] | np.ndarray, row_tokens: int, seed: int, first: int
) -> Iterator[list[int]]:
    """Yield the rows of all epochs, from row `first` on."""
    for epoch in count():
        rows = epoch_rows(lengths, row_tokens, seed=seed, epoch=epoch)
        yield from rows.after(first)
        first = max(0, first - len(rows))
