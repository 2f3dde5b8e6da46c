"""What the objectives share: outputs at rows, their teachers, the loss and the sums to report.

An objective is a function that yields, for each step, a head's logits at the rows that carry loss
(`StepOutput`), and a weight for each step. `train/ttt.py` and `train/parallel.py` have one each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftlab.data.packing import Batch
from draftlab.heads.eagle3 import Eagle3Head
from draftlab.kernels.distill import distill
from draftlab.target.parts import TargetParts


@dataclass(frozen=True)
class StepOutput:
    """Step k of the unroll, or depth k, at the n rows that carry loss there.

    Attributes:
        logits: [n, D], the head's.
        teacher: int64 [n], flat positions b·S + t + 1 + k of their teachers.
    """

    logits: Tensor
    teacher: Tensor


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """x [B, S, …] at positions index [B, R]: [B, R, …]."""
    index = index.view(*index.shape, *[1] * (x.ndim - 2))
    return x.gather(1, index.expand(-1, -1, *x.shape[2:]))


def extend_own(own: Tensor | None, new: Tensor, select: Tensor) -> Tensor:
    """Keeps the surviving rows' own keys [B, R, k − 1, …] and appends this step's [B, R, …]."""
    if own is None:
        return new[:, :, None]
    return torch.cat([take_rows(own, select), new[:, :, None]], 2)


def visible_keys(documents: Tensor, index: Tensor) -> Tensor:
    """bool [B, R, S]: the step-0 keys of the same document at or before each row's position."""
    slots = torch.arange(documents.shape[1], device=documents.device)
    same = documents.gather(1, index)[:, :, None] == documents[:, None]
    return same & (slots <= index[:, :, None])


@dataclass(frozen=True)
class Teacher:
    """The target's distribution at every position that teaches, over the draft vocabulary.

    Attributes:
        logits: float32 [J, D]. row: int64 [B·S], which row a flat position has.
        logsumexp: float32 [B·S]. argmax: int64 [B·S], target ids.
    """

    logits: Tensor
    row: Tensor
    logsumexp: Tensor
    argmax: Tensor


@torch.no_grad()
def teach(parts: TargetParts, target_ids: Tensor, batch: Batch) -> Teacher:
    """Computes each needed teacher once; all steps that share a position share it."""
    flat = batch.tokens.numel()
    needed = torch.zeros(flat, dtype=torch.bool, device=batch.tokens.device)
    for step in batch.steps:
        needed[step.teacher] = True
    positions = needed.nonzero()[:, 0]
    row = needed.cumsum(0) - 1
    logits = parts.logits(batch.last.flatten(0, 1)[positions], target_ids)
    return Teacher(logits, row, batch.logsumexp.flatten(), batch.argmax.flatten())


@dataclass
class Sums:
    """Sums over rows, per step [L]: loss, α, top-1 hits of the target's argmax, and their count."""

    loss: Tensor
    alpha: Tensor
    hits: Tensor
    count: Tensor

    @classmethod
    def zeros(cls, num_steps: int, device: torch.device) -> Sums:
        """Nothing summed yet."""
        return cls(*(torch.zeros(num_steps, device=device) for _ in range(4)))

    def add(self, other: Sums) -> None:
        """Adds another batch's."""
        for mine, theirs in zip(self.tensors(), other.tensors(), strict=True):
            mine += theirs

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The four of them."""
        return self.loss, self.alpha, self.hits, self.count


def weighted_loss(
    outputs: Iterator[StepOutput],
    head: Eagle3Head,
    parts: TargetParts,
    batch: Batch,
    weights: Sequence[float],
) -> tuple[Tensor, Sums]:
    """Σ_k weight_k Σ ℓ over the rows that carry loss, not yet divided by N_0; the sums to report.

    A token outside the draft vocabulary stays in every denominator as a miss.
    """
    target_ids = head.target_ids(torch.arange(len(head.d2t), device=head.d2t.device))
    teacher = teach(parts, target_ids, batch)
    sums = Sums.zeros(len(batch.steps), batch.tokens.device)
    total = torch.zeros((), device=batch.tokens.device)
    for k, step in enumerate(outputs):
        out = distill(
            step.logits, teacher.logits[teacher.row[step.teacher]], teacher.logsumexp[step.teacher]
        )
        total = total + weights[k] * out.loss.sum()
        sums.loss[k] = out.loss.detach().sum()
        sums.alpha[k] = out.alpha.sum()
        sums.hits[k] = (target_ids[out.best] == teacher.argmax[step.teacher]).sum()
        sums.count[k] = len(step.teacher)
    return total, sums
