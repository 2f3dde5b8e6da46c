"""A module of the head and its teacher whose forward pass computes the loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from draftlab.heads.head import DraftHead
from draftlab.train.batch.packing import Batch
from draftlab.train.fast.choose_forward import choose_forward
from draftlab.train.objectives.loss import DraftTeacher, Sums, weighted_loss
from draftlab.train.settings import TrainSettings


def product_dtype(precision: str, device: torch.device) -> torch.dtype:
    """Return the dtype of products that `train.precision` means on a device."""
    if precision == "auto":
        precision = "float32" if device.type == "cpu" else "bfloat16"
    return torch.float32 if precision == "float32" else torch.bfloat16


class DistillationModule(nn.Module):
    """The module that the training loop calls, and that DDP, FSDP2 or ZeRO wrap.

    Args:
        head: on its device.
        target: the head's teacher.
        settings: choose the terms of the loss and the forward pass.
        dtype: dtype of products; weights, sums and gradients stay float32.
    """

    def __init__(
        self, head: DraftHead, target: DraftTeacher, settings: TrainSettings, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.head, self.target, self.dtype = head, target, dtype
        self.objective = head.family.objective()
        self.terms = self.objective.loss_terms(settings)
        self.head_forward, self.description = choose_forward(head, self.objective, settings, dtype)

    def forward(self, batch: Batch, weights: Sequence[float]) -> tuple[Tensor, Sums]:
        """Return `weighted_loss` of a batch, with a gradient for every trained parameter.

        Args:
            weights: weight of each step's sum of losses.
        """
        with torch.autocast(
            batch.tokens.device.type, self.dtype, enabled=self.dtype != torch.float32
        ):
            outputs = self.head_forward(self.head, batch)
            loss, sums = weighted_loss(outputs, self.head, self.target, batch, weights, self.terms)
        if not loss.requires_grad:  # no position of this pass carries loss
            loss = loss + 0 * sum(p.sum() for p in self.head.parameters() if p.requires_grad)
        return loss, sums
