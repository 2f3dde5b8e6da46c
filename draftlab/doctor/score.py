"""The score of a variant: a teacher-forced walk over the target's answers (methods §6), and the
comparison of two variants over the prompts that both were scored on."""

from __future__ import annotations

import math
from collections.abc import Callable
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
from draftlab.evaluate.statistics import acceptance_interval
from draftlab.heads.folder import new_head
from draftlab.heads.head import DraftHead
from draftlab.target_model.model import Target
from draftlab.train.batch.loss_rows import loss_reach
from draftlab.train.batch.packing import Batch
from draftlab.train.validation import walk

ERROR = 0.005
"""Probability that any of the variants with one change is called better by chance, and as much for
all those with two."""
RESAMPLES = 4000
MIN_LOG_PROBABILITY = -12.0  # also of tokens outside the draft vocabulary


@dataclass(frozen=True)
class Comparison:
    """How much more a variant accepts than another, over the prompts that both have.

    Attributes:
        gain: accepted drafts per position above the other's.
        interval: of the gain, which holds for all `tried` variants together with the probability
            1 − 2 · `ERROR`; None with fewer than two prompts.
        num_prompts: number of prompts.
        needed: number of prompts below which no difference is told from chance: if a variant is no
            better, each of n prompts favours it with probability 1/2 at most, and all n do for one
            of `tried` variants with probability `tried` / 2^n at most.
    """

    gain: float
    interval: tuple[float, float] | None
    num_prompts: int
    needed: int

    def exceeds(self, margin: float) -> bool:
        """Return whether the gain is at least `margin`, and above 0 not by chance."""
        enough = self.interval is not None and self.num_prompts >= self.needed
        return enough and self.gain >= margin and self.interval[0] > 0


@dataclass(frozen=True)
class Score:
    """A variant's drafts compared with the target's greedy tokens, per prompt [P].

    Every position whose K drafts lie in the answer counts, not only those of the walk: all variants
    share them, so that far fewer prompts suffice to compare variants.

    Attributes:
        prompts: names of the prompts.
        counters: at the steps that a server would take.
        accepted: accepted drafts summed over positions. positions: their number.
        likelihood: log-probabilities of the target's tokens summed over positions and drafts,
            which show a small change long before an argmax does.
        k: drafts per step.
    """

    prompts: tuple[str, ...]
    counters: tuple[Counters, ...]
    accepted: np.ndarray
    likelihood: np.ndarray
    positions: np.ndarray
    k: int

    @property
    def total(self) -> Counters:
        """Counters of all prompts."""
        return reduce(add, self.counters)

    @property
    def acceptance_interval(self) -> tuple[float, float] | None:
        """The 95 % interval of AL over prompts; None when nothing was drafted."""
        return acceptance_interval(self.counters, samples=RESAMPLES)

    def compare(self, other: Score, tried: int) -> Comparison:
        """Compare a variant with another, prompt by prompt.

        The interval is Student's for a difference of two ratios of sums over prompts.

        Args:
            tried: number of variants that are compared, of which the best is looked at.
        """
        rows, other_rows = (
            {name: row for row, name in enumerate(s.prompts) if s.positions[row]}
            for s in (self, other)
        )
        names = sorted(rows.keys() & other_rows.keys())
        gain, errors = 0.0, np.zeros(len(names))
        for score, places, sign in ((self, rows, 1), (other, other_rows, -1)):
            index = np.array([places[name] for name in names], dtype=int)
            accepted, positions = score.accepted[index], score.positions[index]
            ratio = _ratio(accepted, positions)
            gain += sign * ratio
            errors += sign * (accepted - ratio * positions) / (positions.mean() if names else 1)
        interval = student_interval(gain, errors, 1 - 2 * ERROR / tried)
        return Comparison(
            gain,
            interval and (max(interval[0], -self.k), min(interval[1], self.k)),
            len(names),
            math.ceil(math.log2(tried / ERROR)),
        )

    def likelier(self, other: Score) -> float:
        """Return by how many nats per token the target's tokens are likelier than with another."""
        expected = _ratio(other.likelihood, other.positions * other.k)
        return _ratio(self.likelihood, self.positions * self.k) - expected


def student_interval(value: float, errors: np.ndarray, level: float) -> tuple[float, float] | None:
    """Return Student's interval of a statistic over prompts; None with fewer than two.

    Args:
        errors: [P], each prompt's part of the statistic's deviation, which sum to 0.
    """
    if len(errors) < 2:
        return None
    width = stats.t.ppf((1 + level) / 2, len(errors) - 1) * stats.sem(errors)
    return value - float(width), value + float(width)


def _ratio(values: np.ndarray, counts: np.ndarray) -> float:
    return float(values.sum() / counts.sum()) if counts.sum() else 0.0


class Scorer:
    """Scores variants with one target; it changes no random state and no variant.

    Args:
        scoring_set: returns the target's answers to chats (True) or to plain text (False).
        k: drafts per step.
    """

    def __init__(self, target: Target, scoring_set: Callable[[bool], ScoringSet], k: int) -> None:
        self.target, self.scoring_set, self.k = target, scoring_set, k
        self._last_head: DraftHead | None = None

    def __call__(self, variant: HeadVariant) -> Score:
        """Return the score of a variant."""
        scoring_set, k = self.scoring_set(variant.template), self.k
        batch = scoring_set.batch_for(variant)
        hits, log_probs = (x.cpu() for x in score_drafts(self._head(variant), batch, k))
        counters, sums = [], []
        for row_hits, row_log_probs, spans in zip(hits, log_probs, scoring_set.spans, strict=True):
            row_hits, valid = row_hits[: len(spans)], loss_reach(spans) >= k
            counters.append(walk(row_hits, spans, k)[0])
            accepted = row_hits.long().cumprod(-1).sum(-1)[valid].sum()
            likelihood = row_log_probs[: len(spans)][valid].sum()
            sums.append([float(accepted), float(likelihood), int(valid.sum())])
        accepted_sums, likelihoods, positions = np.array(sums, dtype=float).T
        return Score(scoring_set.prompts, tuple(counters), accepted_sums, likelihoods, positions, k)

    def _head(self, variant: HeadVariant) -> DraftHead:
        """Return the head of a variant.

        If only tensors differ, the last head is used again: building one draws random weights.
        """
        head, unnormed = self._last_head, variant.norm == "unnormed"
        if head is None or head.config != variant.config:
            head = new_head(variant.config).to(device=self.target.device, dtype=self.target.dtype)
            head.eval().requires_grad_(False)
        head.load_tensors(variant.tensors)
        self._last_head = None if unnormed else head
        if unnormed:
            head.target_norm = torch.nn.Identity()
        return head


@torch.inference_mode()
def score_drafts(head: DraftHead, batch: Batch, k: int) -> tuple[Tensor, Tensor]:
    """Return whether step k at position t drafts x_{t+2+k}, and that token's log-probability.

    Returns:
        bool and float32 [B, S, K]; False and 0 where no server would draft.
    """
    rows, width = batch.tokens.shape
    tokens, size = batch.tokens.flatten(), head.config.vocab_size
    ids = head.target_ids(torch.arange(len(head.d2t), device=tokens.device))
    inside = (ids >= 0) & (ids < size)  # a wrong d2t may give any number
    draft_ids = torch.full((size,), -1, device=tokens.device)
    draft_ids[ids[inside]] = inside.nonzero()[:, 0]
    hits = torch.zeros(rows * width, k, dtype=torch.bool, device=tokens.device)
    log_probs = torch.zeros(rows * width, k, device=tokens.device)
    for number, step in enumerate(head.family.objective().forward(head, batch)):
        previous, token = tokens[step.teacher_index], tokens[step.teacher_index + 1]
        logits, position = (
            head.logits(step.output, previous).float(),
            step.teacher_index - 1 - number,
        )
        draft_id = draft_ids[token]
        log_prob = logits.log_softmax(-1).gather(1, draft_id.clamp(min=0)[:, None])[:, 0]
        log_prob = log_prob.masked_fill(draft_id < 0, MIN_LOG_PROBABILITY)
        hits[position, number] = ids[logits.argmax(-1)] == token
        log_probs[position, number] = log_prob.clamp(min=MIN_LOG_PROBABILITY)
    return hits.view(rows, width, k), log_probs.view(rows, width, k)
