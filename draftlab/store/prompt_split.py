"""Splits of records by prompt: all answers to a prompt are on the same side of a split.

A record's id contains its prompt's: `prompt-7~1` is a further answer to `prompt-7`
(`conversations.answer_id`), and `prompt-7#3` continues with the third answer of a conversation
that takes several records (`samples.build_samples`).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

import numpy as np

_NUMBERED = re.compile(r"(.*)#(?:0[0-9]*|1|[0-9]+[~#][0-9]+)", re.DOTALL)
"""Ids that no continuation of a conversation `group 1` has: those begin at #2."""


def group_by_prompt(ids: Sequence[str]) -> np.ndarray:
    """Return the number of each record's prompt, int64 [n], from ids of which no two are equal.

    Prompts are numbered in the order of their first records.
    """
    # Where prompts themselves are named repository#1, or have further answers (repository#12~1),
    # numbers continue a conversation only if there is a `repository`. Its record may have been
    # left out as too long, so else they always do.
    names = {match[1] for id_ in ids if "#" in id_ and (match := _NUMBERED.fullmatch(id_))}
    names = names.difference(ids) if names else names

    def prompt(id_: str) -> str:
        conversation = _without_number(id_, "#")
        return _without_number(id_ if conversation in names else conversation, "~")

    prompts = [prompt(id_) if "#" in id_ or "~" in id_ else id_ for id_ in ids]
    if prompts == list(ids):  # no two are equal
        return np.arange(len(ids))
    numbers = dict(zip(dict.fromkeys(prompts), itertools.count(), strict=False))
    return np.fromiter(map(numbers.__getitem__, prompts), np.int64, len(ids))


def _without_number(id_: str, mark: str) -> str:
    start, _, number = id_.rpartition(mark)
    return start if number.isascii() and number.isdecimal() and len(number) < len(id_) else id_


def hold_out(ids: Sequence[str], share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Split records into training and validation sets, which depend on the seed; return their
    numbers, ascending, int64.

    Validation has its share, in [0, 1), completed to whole prompts. With a share above 0 both sets
    have at least one prompt; of a single prompt nothing is held out.
    """
    prompts = group_by_prompt(ids)
    sizes = np.bincount(prompts)
    most = len(prompts) - int(sizes.max())  # then a prompt is left
    size = min(max(1, round(share * len(prompts))), most) if share else 0
    order = np.random.default_rng([seed, 1]).permutation(len(sizes))
    sizes = sizes[order]
    is_held_out = np.zeros(len(sizes), bool)
    is_held_out[order[: np.searchsorted(sizes.cumsum() - sizes, size)]] = True
    is_held_out = is_held_out[prompts]
    return np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)
