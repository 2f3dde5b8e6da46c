"""Which records fall on which side of a split: answers to one prompt never on two.

A record's id tells whose it is: `prompt-7~1` is a further answer to `prompt-7`
(`conversations.further_id`), and `prompt-7#3` goes on with the third answer of its conversation
where that takes several records (`samples.samples`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np


def by_prompt(ids: Sequence[str]) -> list[list[int]]:
    """The numbers of records in groups that answer to one prompt, ordered by their first ones."""
    known = set(ids)
    prompts: dict[str, list[int]] = {}
    for number, id_ in enumerate(ids):
        whole = re.sub(r"#\d+$", "", id_)
        # Files have ids such as repository#12, too, which are nobody's piece.
        prompt = re.sub(r"~\d+$", "", whole if whole in known else id_)
        prompts.setdefault(prompt, []).append(number)
    return list(prompts.values())


def deal(
    groups: Sequence[Sequence[int]], shares: Sequence[float], seed: int | Sequence[int]
) -> list[list[int]]:
    """Deals whole groups at random to parts of these shares (of what they add up to).

    Every number is in just one part, ascending. A part's size differs from its share of all numbers
    by less than the largest group: who holds a part's last place takes the whole group.
    """
    order = np.random.default_rng(seed).permutation(len(groups))
    sizes = np.array([len(groups[group]) for group in order])
    ends = np.round(np.cumsum(shares) / sum(shares) * sizes.sum())
    parts = np.split(order, np.searchsorted(sizes.cumsum() - sizes, ends[:-1]))
    return [sorted(number for group in part for number in groups[group]) for part in parts]


def hold_out(ids: Sequence[str], share: float, seed: int) -> tuple[list[int], list[int]]:
    """Records for training and for validation, fixed by the seed.

    Validation gets its share, with the rest of its last prompt, and with a share above 0 at least
    one prompt; so does training. Of a single prompt nothing is held out.

    Args:
        share: in [0, 1).
    """
    prompts = by_prompt(ids)
    most = len(ids) - max(map(len, prompts))  # then a prompt is left, whichever comes last
    wanted = min(max(1, round(share * len(ids))), most) if share else 0
    held_out, training = deal(prompts, [wanted, len(ids) - wanted], [seed, 1])
    return training, held_out
