"""Splits of records by prompt: all answers to a prompt are on the same side of a split.

A record's id contains its prompt's: `prompt-7~1` is a further answer to `prompt-7`
(`conversations.answer_id`), and `prompt-7#3` continues with the third answer of a conversation
that takes several records (`samples.build_samples`). Ids are compared by 64-bit hashes, without a
Python object for each: a store may have 100 M records.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from draftlab.store.columns import Texts

_TILDE, _HASH, _ZERO, _ONE, _NINE = b"~#019"
_CHUNK = 1 << 18
"""Records that are read at a time."""


def group_by_prompt(ids: Sequence[str]) -> np.ndarray:
    """Return the number of each record's prompt: int64 [n].

    Prompts are numbered in the order of their first records.

    Args:
        ids: no two are equal.
    """
    texts = Texts.of(ids)
    if not any(len(ids.separators) for ids in _chunks(texts)):
        return np.arange(len(texts))
    prompts, conversations, numbered = np.empty(len(texts), np.uint64), [], []
    for chunk in _chunks(texts):
        suffixes, rows = _suffixes(chunk), slice(chunk.first, chunk.first + len(chunk.stops))
        prompts[rows] = chunk.hashes(slice(None), suffixes.prompt_stops)
        turns = suffixes.turns
        hashes = chunk.hashes(turns, suffixes.turn_stops), chunk.hashes(turns, chunk.stops[turns])
        conversations.append((chunk.first + turns, *hashes))
        numbered.append(chunk.hashes(suffixes.numbered, suffixes.numbered_stops))
    # Continuations begin at #2. Where prompts themselves are named repository#1, or have further
    # answers (repository#12~1), the numbers continue a conversation only if there is a
    # `repository`. Its record may have been left out as too long, so else they always do.
    names = np.unique(np.concatenate(numbered))
    if len(names):
        for chunk in _chunks(texts):
            names = names[~np.isin(names, chunk.hashes(slice(None), chunk.stops))]
        rows, hashes, own_hashes = map(np.concatenate, zip(*conversations, strict=True))
        is_prompt = np.isin(hashes, names)
        prompts[rows[is_prompt]] = own_hashes[is_prompt]
    return _number(prompts)


class _Ids(NamedTuple):
    """Ids of consecutive records.

    Attributes:
        first: number of the first record.
        utf8: uint8, the ids' bytes.
        starts, stops: int64 [n], where the ids begin and end in them.
        separators: int64, where `#` and `~` are.
    """

    first: int
    utf8: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    separators: np.ndarray

    def hashes(self, rows: np.ndarray | slice, stops: np.ndarray) -> np.ndarray:
        """Return the hashes of ids up to these bytes."""
        return hash_texts(self.utf8, self.starts[rows], stops)

    def are_digits(self, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """Return whether there are digits alone, and at least one, in ranges of bytes."""
        result, positions = stops > starts, starts.copy()
        rows = np.flatnonzero(result)
        while len(rows):
            byte = self.utf8[positions[rows]]
            is_digit = (byte >= _ZERO) & (byte <= _NINE)
            result[rows[~is_digit]] = False
            positions[rows] += 1
            rows = rows[is_digit & (positions[rows] < stops[rows])]
        return result


def _chunks(texts: Texts) -> Iterator[_Ids]:
    begin = 0
    for first in range(0, len(texts), _CHUNK):
        ends = texts.ends[first : first + _CHUNK]
        utf8 = np.asarray(texts.utf8[begin : int(ends[-1])])
        stops = ends - begin
        starts = np.concatenate([[0], stops[:-1]])
        separators = np.flatnonzero((utf8 == _HASH) | (utf8 == _TILDE))
        yield _Ids(first, utf8, starts, stops, separators)
        begin = int(ends[-1])


class _Suffixes(NamedTuple):
    """Numbers at the ends of ids, and where they begin.

    Attributes:
        prompt_stops: int64 [n], where the prompts' ids end if all numbers continue
            conversations.
        turns, turn_stops: records that end in `#` and a number, and where that begins.
        numbered, numbered_stops: records whose prompts are named by a number (`name#1`), and where
            that begins.
    """

    prompt_stops: np.ndarray
    turns: np.ndarray
    turn_stops: np.ndarray
    numbered: np.ndarray
    numbered_stops: np.ndarray


def _suffixes(ids: _Ids) -> _Suffixes:
    """Read the suffixes `~number` and `#number` of ids."""
    utf8, at = ids.utf8, ids.separators
    rows = np.searchsorted(ids.stops, at, side="right")
    last = np.flatnonzero(np.diff(rows, append=-1))  # the last separator of each id
    last = last[ids.are_digits(at[last] + 1, ids.stops[rows[last]])]
    rows_before, at_before = np.roll(rows, 1)[last], np.roll(at, 1)[last]
    rows, at = rows[last], at[last]
    has_two = (last > 0) & (rows_before == rows)
    has_two[has_two] = ids.are_digits(at_before[has_two] + 1, at[has_two])

    is_turn, is_turn_before = utf8[at] == _HASH, utf8[at_before] == _HASH
    prompt_stops = ids.stops.copy()
    prompt_stops[rows] = np.where(is_turn & has_two & ~is_turn_before, at_before, at)
    digit = utf8[at + 1]
    below_2 = is_turn & ((digit == _ZERO) | ((digit == _ONE) & (ids.stops[rows] == at + 2)))
    name_stops = np.where(below_2, at, at_before)
    is_numbered = below_2 | (has_two & is_turn_before)
    return _Suffixes(
        prompt_stops, rows[is_turn], at[is_turn], rows[is_numbered], name_stops[is_numbered]
    )


def _number(hashes: np.ndarray) -> np.ndarray:
    """Number equal hashes equally, in the order of their first places: int64 [n]."""
    # Answers to a prompt often lie side by side, so runs of them are sorted.
    is_new = np.concatenate([[True], hashes[1:] != hashes[:-1]])
    begins = np.flatnonzero(is_new)
    runs, lengths = hashes[begins], np.diff(begins, append=len(hashes))
    ordered = np.sort(runs)
    if np.all(ordered[1:] != ordered[:-1]):  # all do
        return np.repeat(np.arange(len(runs)), lengths)
    order = np.argsort(runs)
    runs = runs[order]
    is_new_group = np.concatenate([[True], runs[1:] != runs[:-1]])
    first_runs = np.minimum.reduceat(order, np.flatnonzero(is_new_group))
    is_first_run = np.zeros(len(runs), bool)
    is_first_run[first_runs] = True
    numbers = (is_first_run.cumsum() - 1)[first_runs]
    of_runs = np.empty_like(order)
    of_runs[order] = numbers[is_new_group.cumsum() - 1]
    return np.repeat(of_runs, lengths)


def split_groups(
    groups: np.ndarray, shares: Sequence[float], seed: int | Sequence[int]
) -> list[np.ndarray]:
    """Assign whole groups at random to parts in proportion to `shares`.

    Args:
        groups: int64 [n], the number of each record's group. Every number below the largest is one.

    Returns:
        For each part the numbers of its records, ascending: int64. Every record is in one part. The
        size of a part differs from its share of all records by less than the largest group.
    """
    sizes = np.bincount(groups)
    order = np.random.default_rng(seed).permutation(len(sizes))
    sizes = sizes[order]
    ends = np.round(np.cumsum(shares) / sum(shares) * sizes.sum())
    cuts = np.searchsorted(sizes.cumsum() - sizes, ends[:-1])
    parts = np.empty(len(order), np.int32)
    for part, places in enumerate(np.split(order, cuts)):
        parts[places] = part
    parts = parts[groups]
    return [np.flatnonzero(parts == part) for part in range(len(shares))]


def hold_out(ids: Sequence[str], share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Split records into training and validation sets, which depend on the seed.

    Validation has its share, completed to whole prompts. With a share above 0 both sets have at
    least one prompt; of a single prompt nothing is held out.

    Args:
        share: in [0, 1).

    Returns:
        The numbers of the records of both sets, ascending: int64.
    """
    prompts = group_by_prompt(ids)
    most = len(prompts) - int(np.bincount(prompts).max())  # then a prompt is left
    size = min(max(1, round(share * len(prompts))), most) if share else 0
    validation, training = split_groups(prompts, [size, len(prompts) - size], [seed, 1])
    return training, validation


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
