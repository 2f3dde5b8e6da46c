"""Draw the drafts of a step from a head's logits, one depth after the other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftlab.kernels.noise import BLOCK_STRIDE
from draftlab.kernels.sampling import argmax_draft, sample_draft
from draftlab.kernels.sampling.types import DraftDistribution, SamplingMetadata

if TYPE_CHECKING:
    from draftlab.engine.drafter import HeadDrafter


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


class DraftSampler:
    """The drafts of one step, [K, B]: depth is the outer dimension, so that each one's rows are
    contiguous.

    With block verification, which looks at drafts behind a rejected one, each step draws from noise
    of its own (`BLOCK_STRIDE`).

    Args:
        drafter: whose drafts they are.
        last: int64 [B], position of each row's last verified pair. The pair at position p predicts
            position p + 2.
        keys: temperatures and noise keys of the rows.
        logits: [K, B, W] in the head's dtype, where the drafts' logits are; needed with the
            drafter's `draft_probs`.
    """

    def __init__(
        self,
        drafter: HeadDrafter,
        last: Tensor,
        keys: SamplingMetadata,
        logits: Tensor | None = None,
    ) -> None:
        self.ids, self.index = drafter.draft_ids, drafter.draft_index
        self.keys, self.logits, self.probabilities = keys, logits, drafter.draft_probs
        fresh = drafter.verification == "block" and drafter.draft_probs  # argmaxes read no noise
        self.positions = last * BLOCK_STRIDE if fresh else last
        self.tokens = keys.seed.new_empty(drafter.k, len(last))
        self.log_sum = keys.temperature.new_empty(drafter.k, len(last))
        self.confidence = torch.empty_like(self.log_sum) if drafter.confidence else None
        if drafter.confidence and not drafter.draft_probs:
            # Every draft is an argmax, with its confidence at T = 1.
            self.keys = replace(keys, temperature=torch.zeros_like(keys.temperature))

    def draw(self, depth: int, logits: Tensor, confidence: Tensor | None = None) -> Tensor:
        """Draw the drafts at a depth from logits [B, W]; return their target ids, int64 [B].

        Args:
            confidence: float32 [B], the head's own logits of confidence; None: the logit of the
                largest probability of q.
        """
        tokens = self.tokens[depth]
        scores = None if self.confidence is None else self.confidence[depth]
        if scores is not None and confidence is not None:
            scores.copy_(confidence)
            scores = None
        if not self.probabilities and scores is None:
            return argmax_draft(logits, ids=self.ids, out=tokens)
        sample_draft(
            logits,
            self.positions,
            self.keys,
            ids=self.ids,
            offset=2 + depth,
            out=(tokens, self.log_sum[depth]),
            confidence=scores,
        )
        return tokens

    def draw_all(self, logits: Tensor) -> None:
        """Draw the drafts of all depths from logits [K, B, W] that depend on no draft."""
        if not self.probabilities and self.confidence is None:  # in one call
            flat = logits.flatten(0, 1)
            argmax_draft(flat, ids=self.ids, out=self.tokens.flatten())
            return
        for depth in range(len(logits)):
            self.draw(depth, logits[depth])

    def proposal(self) -> Proposal:
        """Return the drafts once all depths are drawn."""
        distribution = None
        if self.probabilities and self.logits is not None:
            distribution = DraftDistribution(
                self.logits.transpose(0, 1),
                self.log_sum.T,
                self.keys.temperature,
                self.ids,
                self.index,
            )
        confidence = None if self.confidence is None else self.confidence.T
        return Proposal(self.tokens.T, distribution, confidence)
