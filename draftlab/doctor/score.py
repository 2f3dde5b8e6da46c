"""How well a reading fits: the teacher-forced walk over the target's own answers (methods §6)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import add

import numpy as np
import torch
from torch import Tensor

from draftlab.doctor.head_variant import Reading
from draftlab.doctor.scoring_set import ScoringSet
from draftlab.engine.counters import Counters
from draftlab.evaluate.statistics import acceptance_interval, percentile_interval, resample_sums
from draftlab.heads.folder import new_head
from draftlab.heads.head import DraftHead
from draftlab.target_model.model import Target
from draftlab.train.batch.loss_rows import loss_reach
from draftlab.train.batch.packing import Batch
from draftlab.train.validation import walk

LEVEL = 0.999  # of an interval that tells readings apart: some thirty are tried
RESAMPLES = 4000
FLOOR = -12.0  # log-probability of what a head gives none at all, such as a token it does not know


@dataclass(frozen=True)
class Score:
    """A reading's drafts against the target's greedy tokens, prompt by prompt [P].

    Every position whose K drafts lie in the answer counts, not only those of the walk: readings of
    the same answers share them, and are told apart with far fewer prompts.

    Attributes:
        walked: counters at the steps a server would take.
        runs: accepted drafts summed over positions. positions: how many those are.
        likelihood: log-probabilities of the target's tokens summed over positions and drafts; it
            sees a small change long before an argmax does.
        k: drafts a step.
    """

    walked: tuple[Counters, ...]
    runs: np.ndarray
    likelihood: np.ndarray
    positions: np.ndarray
    k: int

    @property
    def total(self) -> Counters:
        """Counters of all prompts."""
        return reduce(add, self.walked)

    @property
    def acceptance_interval(self) -> tuple[float, float] | None:
        """95 % of AL, over prompts; None when nothing was drafted."""
        return acceptance_interval(self.walked, samples=RESAMPLES)

    def gain(self, over: Score) -> float:
        """Accepted drafts a position more than another's."""
        return _ratio(self.runs, self.positions) - _ratio(over.runs, over.positions)

    def likelier(self, over: Score) -> tuple[float, tuple[float, float]]:
        """Nats by which a token is likelier than to another, and their interval over prompts."""
        mine, theirs = self.positions * self.k, over.positions * over.k
        difference = _ratio(self.likelihood, mine) - _ratio(over.likelihood, theirs)
        a, n, b, m = resample_sums(
            self.likelihood, mine, over.likelihood, theirs, samples=RESAMPLES
        )
        with np.errstate(invalid="ignore", divide="ignore"):
            return difference, percentile_interval(a / n - b / m, LEVEL)


def _ratio(values: np.ndarray, counts: np.ndarray) -> float:
    return float(values.sum() / counts.sum()) if counts.sum() else 0.0


class Scorer:
    """Scores readings with one target; no random state is changed, and no reading.

    Args:
        evidence: the target's answers to chats (True) or to plain text (False).
        k: drafts a step.
    """

    def __init__(self, target: Target, evidence: Callable[[bool], ScoringSet], k: int) -> None:
        self.target, self.evidence, self.k = target, evidence, k
        self._built: DraftHead | None = None

    def __call__(self, reading: Reading) -> Score:
        evidence, k = self.evidence(reading.template), self.k
        drafted = draft(self._head(reading), evidence.seen_by(reading), k)
        hits, likelihood = (x.cpu() for x in drafted)
        walked, sums = [], []
        for row, chances, spans in zip(hits, likelihood, evidence.spans, strict=True):
            own, whole = row[: len(spans)], loss_reach(spans) >= k
            walked.append(walk(own, spans, k)[0])
            run = own.long().cumprod(-1).sum(-1)[whole].sum()
            sums.append([float(run), float(chances[: len(spans)][whole].sum()), int(whole.sum())])
        runs, likelihoods, positions = np.array(sums, dtype=float).T
        return Score(tuple(walked), runs, likelihoods, positions, k)

    def _head(self, reading: Reading) -> DraftHead:
        """The head of a reading: the last one's, where only tensors differ, since building one
        draws random weights first."""
        head, unnormed = self._built, reading.norm == "before"
        if head is None or head.config != reading.config:
            head = new_head(reading.config).to(device=self.target.device, dtype=self.target.dtype)
            head.eval().requires_grad_(False)
        head.load_tensors(reading.tensors)
        self._built = None if unnormed else head
        if unnormed:
            head.target_norm = torch.nn.Identity()
        return head


@torch.inference_mode()
def draft(head: DraftHead, batch: Batch, k: int) -> tuple[Tensor, Tensor]:
    """Of step k at t: whether it drafted x_{t+2+k}, and the log-probability it gave that token.

    Returns:
        bool and float32 [B, S, K]; False and 0 where no server would ask.
    """
    rows, width = batch.tokens.shape
    tokens, size = batch.tokens.flatten(), head.config.vocab_size
    ids = head.target_ids(torch.arange(len(head.d2t), device=tokens.device))
    inside = (ids >= 0) & (ids < size)  # a misread d2t may lead anywhere
    draft_of = torch.full((size,), -1, device=tokens.device)
    draft_of[ids[inside]] = inside.nonzero()[:, 0]
    hits = torch.zeros(rows * width, k, dtype=torch.bool, device=tokens.device)
    likelihood = torch.zeros(rows * width, k, device=tokens.device)
    for number, step in enumerate(head.family.objective().forward(head, batch)):
        logits = head.logits(step.output).float()
        at, token = step.teacher_index - 1 - number, tokens[step.teacher_index + 1]
        known = draft_of[token]
        chance = logits.log_softmax(-1).gather(1, known.clamp(min=0)[:, None])[:, 0]
        hits[at, number] = ids[logits.argmax(-1)] == token
        likelihood[at, number] = torch.where(known >= 0, chance.clamp(min=FLOOR), FLOOR)
    return hits.view(rows, width, k), likelihood.view(rows, width, k)
