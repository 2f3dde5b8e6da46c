"""Statistics of answers: acceptance length with its interval, and the rate of repetitions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from draftlab.engine.counters import Counters
from draftlab.intervals import prompt_interval, resample_sums


def repetition_rate(answers: Iterable[Sequence[int]], n: int = 4) -> float:
    """Return the mean share of n-grams that repeat an earlier n-gram of the same answer.

    Answers shorter than n tokens are left out.
    """
    shares = []
    for answer in answers:
        grams = Counter(tuple(answer[i : i + n]) for i in range(len(answer) - n + 1))
        if grams:
            shares.append(1 - len(grams) / grams.total())
    return float(np.mean(shares)) if shares else 0.0


def acceptance_interval(
    per_prompt: Sequence[Counters], *, samples: int = 2000, level: float = 0.95, seed: int = 0
) -> tuple[float, float] | None:
    """Return the bootstrap interval of AL over prompts; None: too few have drafts.

    scipy.stats.bootstrap is no replacement: it returns NaN if one resample holds no draft.
    """
    drafts = np.array([c.drafts for c in per_prompt], dtype=float)
    drafted = np.count_nonzero(drafts)
    if not drafted:
        return None
    accepted = np.array([c.accepted for c in per_prompt], dtype=float)
    accepted, drafts = resample_sums(accepted, drafts, samples=samples, seed=seed)
    with np.errstate(invalid="ignore"):  # 0 / 0 is NaN, which the interval ignores
        return prompt_interval(1 + accepted / drafts, drafted, level)
