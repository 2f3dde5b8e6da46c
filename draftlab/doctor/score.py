"""The score of a variant: a teacher-forced walk over the target's answers (methods §6), and the
comparison of two variants over the prompts that both were scored on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce
from operator import add

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from draftlab.doctor.hypotheses import HeadVariant
from draftlab.doctor.target_session import ScoringSet
from draftlab.engine.counters import Counters
from draftlab.evaluate.metrics import acceptance_interval
from draftlab.heads.folder import empty_head
from draftlab.heads.head import DraftHead
from draftlab.train.batch.loss_rows import loss_reach
from draftlab.train.batch.packing import Batch
from draftlab.train.validation import walk

ERROR = 0.005
"""Probability that any of the variants is called better by chance."""
RESAMPLES = 4000


@dataclass(frozen=True)
class Score:
    """A variant's drafts compared with the target's greedy tokens, per prompt [P].

    Every position whose K drafts lie in the answer counts, not only those of the walk: all variants
    share them, so that far fewer prompts suffice to compare variants.

    Attributes:
        counters: at the steps that a server would take.
        accepted: accepted drafts summed over positions.
        positions: their number.
        k: drafts per step.
    """

    counters: tuple[Counters, ...]
    accepted: np.ndarray
    positions: np.ndarray
    k: int

    @property
    def total(self) -> Counters:
        """Counters of all prompts."""
        return reduce(add, self.counters)

    @property
    def num_prompts(self) -> int:
        """Number of prompts with positions."""
        return int(np.count_nonzero(self.positions))

    @property
    def acceptance_interval(self) -> tuple[float, float] | None:
        """The 95 % interval of AL over prompts; None when nothing was drafted."""
        return acceptance_interval(self.counters, samples=RESAMPLES)

    def gain(self, other: Score, tried: int) -> tuple[float, tuple[float, float] | None]:
        """Return how many more drafts are accepted per position than another variant's.

        Args:
            tried: number of variants that are compared, of which the best is looked at.

        Returns:
            The gain and Student's interval of it over prompts, which holds for all `tried` variants
            together with the probability 1 − 2 · `ERROR`; None: there are too few prompts.
        """
        known = self.positions > 0
        positions, more = self.positions[known], (self.accepted - other.accepted)[known]
        gain = float(more.sum() / positions.sum()) if known.any() else 0.0
        if self.num_prompts < needed_prompts(tried):
            return gain, None
        errors = (more - gain * positions) / positions.mean()
        ends = student_interval(gain, errors, 1 - 2 * ERROR / tried)
        return gain, ends and (max(ends[0], -self.k), min(ends[1], self.k))


def needed_prompts(tried: int) -> int:
    """Return the number of prompts below which no difference is told from chance.

    If a variant is no better, each of n prompts favours it with probability 1/2 at most, and all n
    do for one of `tried` variants with probability `tried` / 2^n at most.
    """
    return math.ceil(math.log2(max(tried, 1) / ERROR))


def student_interval(value: float, errors: np.ndarray, level: float) -> tuple[float, float] | None:
    """Return Student's interval of a statistic over prompts; None with fewer than two.

    Args:
        errors: [P], each prompt's part of the statistic's deviation, which sum to 0.
    """
    if len(errors) < 2:
        return None
    width = stats.t.ppf((1 + level) / 2, len(errors) - 1) * stats.sem(errors)
    return value - float(width), value + float(width)


class Scorer:
    """Scores variants with one target; it changes no random state and no variant.

    Args:
        scoring_set: the target's answers.
        k: drafts per step.
    """

    def __init__(self, scoring_set: ScoringSet, k: int) -> None:
        self.target, self.scoring_set, self.k = scoring_set.target, scoring_set, k
        self._last_head: DraftHead | None = None

    def __call__(self, variant: HeadVariant) -> Score:
        """Return the score of a variant."""
        scoring_set, k = self.scoring_set, self.k
        batch = scoring_set.batch_for(variant)
        hits = score_drafts(self._head(variant), batch, k).cpu()
        counters, sums = [], []
        for row_hits, spans in zip(hits, scoring_set.spans, strict=True):
            row_hits, valid = row_hits[: len(spans)], loss_reach(spans) >= k
            counters.append(walk(row_hits, spans, k)[0])
            accepted = row_hits.long().cumprod(-1).sum(-1)[valid].sum()
            sums.append([float(accepted), int(valid.sum())])
        accepted_sums, positions = np.array(sums, dtype=float).T
        return Score(tuple(counters), accepted_sums, positions, k)

    def _head(self, variant: HeadVariant) -> DraftHead:
        """Return the head of a variant.

        If only tensors differ, the last head is used again.
        """
        head, unnormed = self._last_head, variant.norm == "unnormed"
        if head is None or head.config != variant.config:
            head = empty_head(variant.config).to(device=self.target.device, dtype=self.target.dtype)
            head.eval().requires_grad_(False)
        head.load_tensors(variant.tensors)
        self._last_head = None if unnormed else head
        if unnormed:
            head.target_norm = torch.nn.Identity()
        return head


@torch.inference_mode()
def score_drafts(head: DraftHead, batch: Batch, k: int) -> Tensor:
    """Return whether step k at position t drafts x_{t+2+k}, bool [B, S, K].

    It is False where no server would draft.
    """
    rows, width = batch.tokens.shape
    tokens = batch.tokens.flatten()
    ids = head.target_ids(torch.arange(len(head.d2t), device=tokens.device))
    hits = torch.zeros(rows * width, k, dtype=torch.bool, device=tokens.device)
    for number, step in enumerate(head.family.objective().forward(head, batch)):
        previous, token = tokens[step.teacher_index], tokens[step.teacher_index + 1]
        position = step.teacher_index - 1 - number
        logits = head.logits(step.output, previous)
        drafted = ids[head.drawn_logits(logits, step.output, previous).argmax(-1)]
        hits[position, number] = drafted == token
    return hits.view(rows, width, k)
