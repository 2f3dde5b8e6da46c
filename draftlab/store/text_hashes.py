"""Hashes of many short texts at a time, by numpy."""

from __future__ import annotations

import numpy as np

_MULTIPLIERS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)


def hash_texts(utf8: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """Return a 64-bit hash of each text. Two of 100 M texts have one hash in 1 of 3,700 cases.

    Args:
        utf8: uint8, bytes that contain the texts.
        starts, stops: int64 [n], where the texts begin and end in them.

    Returns:
        uint64 [n].
    """
    padded = np.concatenate([utf8, np.zeros(8, np.uint8)])
    # words[i] is the eight bytes from byte i on.
    words = np.ndarray((len(padded) - 7,), "<u8", padded, strides=(1,))
    lengths = stops - starts
    hashes = _mix(lengths.astype(np.uint64))
    rows = np.flatnonzero(lengths > 0)
    start = 0
    while len(rows):
        word = words[starts[rows] + start]
        rest = np.minimum(lengths[rows] - start, 8)
        word &= np.uint64(2**64 - 1) >> ((8 - rest) * 8).astype(np.uint64)
        hashes[rows] = _mix(hashes[rows] ^ word)
        start += 8
        rows = rows[lengths[rows] > start]
    return hashes


def _mix(values: np.ndarray) -> np.ndarray:
    """Return a permutation of 64-bit numbers that mixes all bits (the last steps of SplitMix64)."""
    values = values ^ (values >> _SHIFTS[0])
    values *= _MULTIPLIERS[0]
    values ^= values >> _SHIFTS[1]
    values *= _MULTIPLIERS[1]
    values ^= values >> _SHIFTS[2]
    return values
