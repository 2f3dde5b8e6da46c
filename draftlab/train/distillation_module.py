"""A head and its teacher as one module."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from draftlab.heads.head import DraftHead
from draftlab.train.batch.packing import Batch
from draftlab.train.families import OBJECTIVES
from draftlab.train.fast.choose_forward import unrolling
from draftlab.train.objectives.loss import DraftTeacher, Sums, weighted_loss
from draftlab.train.settings import TrainSettings


class DistillationModule(nn.Module):
    """What training calls, and what several processes wrap: its parameters are the head's.

    Args:
        head: on its device.
        target: its teacher.
        settings: say what the loss is made of.
        dtype: of products; weights, sums and gradients stay float32.
    """

    def __init__(
        self, head: DraftHead, target: DraftTeacher, settings: TrainSettings, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.head, self.target, self.dtype = head, target, dtype
        self.objective = OBJECTIVES[head.config.family]
        self.terms = self.objective.terms(settings)
        self.outputs, self.how = unrolling(head, self.objective.outputs, settings, dtype)

    def forward(self, batch: Batch, weights: Sequence[float]) -> tuple[Tensor, Sums]:
        """`weighted_loss` of a batch of one pass, with a gradient for all that is trained.

        Args:
            weights: of each step's sum of losses.
        """
        with torch.autocast(
            batch.tokens.device.type, self.dtype, enabled=self.dtype != torch.float32
        ):
            outputs = self.outputs(self.head, batch)
            loss, sums = weighted_loss(outputs, self.head, self.target, batch, weights, self.terms)
        if not loss.requires_grad:  # no position of this pass carries loss
            loss = loss + 0 * sum(p.sum() for p in self.head.parameters() if p.requires_grad)
        return loss, sums
