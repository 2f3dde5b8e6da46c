"""Draw the drafts of a step from a head's logits, one depth after the other."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftlab.kernels.noise import BLOCK_STRIDE
from draftlab.kernels.sampling import argmax_draft, sample_draft
from draftlab.kernels.sampling.types import DraftDistribution, SamplingMetadata


@dataclass(frozen=True)
class Proposal:
    """Draft tokens of B rows as target ids, and what is known of them.

    Attributes:
        tokens: int64 [B, K].
        distribution: what sampled drafts were drawn from; None: every draft is an argmax.
        confidence: float32 [B, K], the logit of each draft's confidence, or None. It depends on
            the tokens before the draft and not on the draft itself.
    """

    tokens: Tensor
    distribution: DraftDistribution | None = None
    confidence: Tensor | None = None


@dataclass(frozen=True)
class DraftSettings:
    """The settings by which drafts are drawn.

    Attributes:
        probabilities: whether rows that sample draw their drafts from q and keep q.
        confidence: whether to state each draft's confidence.
        fresh_noise: whether each step draws from noise of its own (`BLOCK_STRIDE`), as block
            verification needs, which looks at drafts behind a rejected one.
        ids: int64 [W], target ids of the draft vocabulary; index: int32 [V], its inverse.
    """

    probabilities: bool
    confidence: bool
    fresh_noise: bool
    ids: Tensor
    index: Tensor


class DraftSampler:
    """The drafts of one step, [K, B]: depth is the outer dimension, so that each one's rows are
    contiguous.

    Args:
        settings: how to draw.
        k: drafts a row.
        last: int64 [B], position of each row's last verified pair. The pair at position p predicts
            position p + 2.
        keys: noise keys of the rows.
        sampling: draft temperature float32 [B], and bool [B], which rows sample.
        logits: [K, B, W] in the head's dtype, where the drafts' logits are; needed with
            `settings.probabilities`.
    """

    def __init__(
        self,
        settings: DraftSettings,
        k: int,
        last: Tensor,
        keys: SamplingMetadata,
        sampling: tuple[Tensor, Tensor],
        logits: Tensor | None = None,
    ) -> None:
        self.settings, self.keys, self.sampling, self.logits = settings, keys, sampling, logits
        # Argmaxes read no noise.
        fresh = settings.fresh_noise and settings.probabilities
        self.positions = last * BLOCK_STRIDE if fresh else last
        self.tokens = keys.seed.new_empty(k, len(last))
        self.log_sum = keys.temperature.new_empty(k, len(last))
        self.confidence = torch.empty_like(self.log_sum) if settings.confidence else None
        if settings.confidence and not settings.probabilities:
            # Every draft is an argmax, with its confidence at T = 1.
            temperature, sampled = sampling
            self.sampling = torch.zeros_like(temperature), torch.zeros_like(sampled)

    def draw(self, depth: int, logits: Tensor, confidence: Tensor | None = None) -> Tensor:
        """Draw the drafts at a depth from logits [B, W]; return their target ids, int64 [B].

        Args:
            confidence: float32 [B], the head's own logits of confidence; None: the logit of the
                largest probability of q.
        """
        settings, tokens = self.settings, self.tokens[depth]
        scores = None if self.confidence is None else self.confidence[depth]
        if scores is not None and confidence is not None:
            scores.copy_(confidence)
            scores = None
        if not settings.probabilities and scores is None:
            return argmax_draft(logits, ids=settings.ids, out=tokens)
        sample_draft(
            logits,
            self.positions,
            self.keys,
            *self.sampling,
            ids=settings.ids,
            offset=2 + depth,
            out=(tokens, self.log_sum[depth]),
            confidence=scores,
        )
        return tokens

    def draw_all(self, logits: Tensor) -> None:
        """Draw the drafts of all depths from logits [K, B, W] that depend on no draft."""
        if not self.settings.probabilities and self.confidence is None:  # in one call
            flat = logits.flatten(0, 1)
            argmax_draft(flat, ids=self.settings.ids, out=self.tokens.flatten())
            return
        for depth in range(len(logits)):
            self.draw(depth, logits[depth])

    def proposal(self) -> Proposal:
        """Return the drafts once all depths are drawn."""
        distribution = None
        if self.settings.probabilities and self.logits is not None:
            distribution = DraftDistribution(
                self.logits.transpose(0, 1),
                self.log_sum.T,
                *self.sampling,
                self.settings.ids,
                self.settings.index,
            )
        confidence = None if self.confidence is None else self.confidence.T
        return Proposal(self.tokens.T, distribution, confidence)
