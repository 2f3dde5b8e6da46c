"""The drafts of verify steps with their confidence, as arrays, and their split by prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from draftlab.engine.sampling import Generation

MAX_LOGIT = 40.0
"""Logits are clipped to this size: a draft whose probability rounds to 1 has an infinite one."""


@dataclass(frozen=True)
class DraftBlocks:
    """N verify steps of at most K drafts each (methods §6.7).

    Attributes:
        confidence: float64 [N, K], the logit of each draft's raw confidence. It depends on the
            tokens before the draft alone.
        num_drafts: int64 [N], drafts that were verified. Later entries of `confidence` have no
            outcome: they are missing, not rejected.
        accepted: int64 [N], how many of the first drafts were accepted.
        prompt: int64 [N], number of the step's prompt.
    """

    confidence: np.ndarray
    num_drafts: np.ndarray
    accepted: np.ndarray
    prompt: np.ndarray

    @classmethod
    def from_generations(cls, generations: Sequence[Generation]) -> DraftBlocks:
        """Return the blocks of one or more generations, one of each prompt.

        Steps without drafts are left out. The drafter must have stated confidence.
        """
        k = generations[0].counters.k
        rows = [
            (confidence[:drafted] + (math.nan,) * (k - drafted), drafted, accepted, prompt)
            for prompt, generation in enumerate(generations)
            for confidence, (drafted, accepted) in zip(
                generation.confidence, generation.steps, strict=True
            )
            if drafted
        ]
        confidence, *counts = zip(*rows, strict=True) if rows else ((),) * 4
        logits = np.array(confidence, dtype=np.float64).reshape(-1, k)
        return cls(
            logits.clip(-MAX_LOGIT, MAX_LOGIT),
            *(np.array(values, dtype=np.int64) for values in counts),
        )

    def __len__(self) -> int:
        return len(self.accepted)

    @property
    def k(self) -> int:
        """Return the largest number of drafts a step."""
        return self.confidence.shape[1]

    @property
    def num_prompts(self) -> int:
        """Return how many prompts have a block."""
        return len(np.unique(self.prompt))

    @property
    def has_draft(self) -> np.ndarray:
        """Return which drafts were verified, bool [N, K]."""
        return np.arange(self.k) < self.num_drafts[:, None]

    def survivors(self, position: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the blocks that had this draft, int64 [M], and whether it survived, bool [M].

        A draft survives if it and all drafts before it are accepted.
        """
        rows = np.flatnonzero(self.num_drafts > position)
        return rows, self.accepted[rows] > position

    def select(self, rows: np.ndarray) -> DraftBlocks:
        """Return some of the blocks."""
        return DraftBlocks(
            self.confidence[rows], self.num_drafts[rows], self.accepted[rows], self.prompt[rows]
        )

    def split(self, seed: int = 0) -> tuple[DraftBlocks, DraftBlocks]:
        """Return the blocks of a random half of the prompts, and those of the other half.

        The halves depend on the numbers of the prompts and on the seed alone.
        """
        prompts = np.unique(self.prompt)
        first = np.random.default_rng(seed).permutation(prompts)[: (len(prompts) + 1) // 2]
        in_first = np.isin(self.prompt, first)
        return self.select(in_first), self.select(~in_first)
