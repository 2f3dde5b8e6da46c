"""Splits of records by prompt: all answers to a prompt are on the same side of a split.

A record's id contains its prompt's: `prompt-7~1` is a further answer to `prompt-7`
(`conversations.answer_id`), and `prompt-7#3` continues with the third answer of a conversation
that takes several records (`samples.build_samples`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np


def group_by_prompt(ids: Sequence[str]) -> list[list[int]]:
    """Return record numbers in a group for each prompt, ordered by their first records."""
    all_ids = set(ids)
    # Continuations begin at #2. Where prompts themselves are named repository#1, or have further
    # answers (repository#12~1), the numbers continue a conversation only if there is a
    # `repository`. Its record may have been left out as too long, so else they always do.
    prompt_number = re.compile(r"(.*)#(?:0\d*|1|\d+[~#]\d+)", re.DOTALL)
    numbered = {match[1] for match in map(prompt_number.fullmatch, ids) if match} - all_ids
    groups: dict[str, list[int]] = {}
    for number, id_ in enumerate(ids):
        conversation = re.sub(r"#\d+$", "", id_)
        if conversation in numbered:
            conversation = id_
        groups.setdefault(re.sub(r"~\d+$", "", conversation), []).append(number)
    return list(groups.values())


def split_groups(
    groups: Sequence[Sequence[int]], shares: Sequence[float], seed: int | Sequence[int]
) -> list[list[int]]:
    """Assign whole groups at random to parts in proportion to `shares`.

    Every number is in one part, in ascending order. The size of a part differs from its share of
    all numbers by less than the largest group.
    """
    order = np.random.default_rng(seed).permutation(len(groups))
    sizes = np.array([len(groups[group]) for group in order])
    ends = np.round(np.cumsum(shares) / sum(shares) * sizes.sum())
    parts = np.split(order, np.searchsorted(sizes.cumsum() - sizes, ends[:-1]))
    return [sorted(number for group in part for number in groups[group]) for part in parts]


def hold_out(ids: Sequence[str], share: float, seed: int) -> tuple[list[int], list[int]]:
    """Split records into training and validation sets, which depend on the seed.

    Validation has its share, completed to whole prompts. With a share above 0 both sets have at
    least one prompt; of a single prompt nothing is held out.

    Args:
        share: in [0, 1).
    """
    prompts = group_by_prompt(ids)
    most = len(ids) - max(map(len, prompts))  # then a prompt is left, whichever comes last
    size = min(max(1, round(share * len(ids))), most) if share else 0
    validation, training = split_groups(prompts, [size, len(ids) - size], [seed, 1])
    return training, validation
