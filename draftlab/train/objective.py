"""What the objectives share: outputs at rows, their teachers, the loss and the sums to report.

An objective is a function that yields, for each step, a head's logits at the rows that carry loss
(`StepOutput`), and a weight for each step. `train/ttt.py` and `train/parallel.py` have one each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftlab.data.packing import Batch, StepRows
from draftlab.heads.eagle3 import Eagle3Head
from draftlab.kernels.distill import Teacher
from draftlab.kernels.distill_linear import distill_linear
from draftlab.kernels.distill_plan import plan_rows
from draftlab.target.parts import TargetParts


@dataclass(frozen=True)
class StepOutput:
    """Step k of the unroll, or depth k, at the n rows that carry loss there.

    Attributes:
        output: [n, H], the head's, before its norm.
        teacher: int64 [n], flat positions b·S + t + 1 + k of their teachers.
    """

    output: Tensor
    teacher: Tensor


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """x [B, S, …] at positions index [B, R]: [B, R, …]."""
    index = index.view(*index.shape, *[1] * (x.ndim - 2))
    return x.gather(1, index.expand(-1, -1, *x.shape[2:]))


def row_starts(starts: Tensor, rows: StepRows) -> Tensor:
    """Where the document of each row begins, int64 [B, R]; S for padding rows, which see nothing.

    Args:
        starts: int64 [B, S], of each slot (`document_starts`).
    """
    found = torch.full_like(rows.index, starts.shape[1]).flatten()
    found[rows.loss] = starts.gather(1, rows.index).flatten()[rows.loss]
    return found.view_as(rows.index)


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
    sums = Sums.zeros(len(batch.steps), batch.tokens.device)
    steps = list(outputs)
    if not steps:
        return torch.zeros((), device=batch.tokens.device), sums
    target_ids = head.target_ids(torch.arange(len(head.d2t), device=head.d2t.device))
    row, sizes = torch.cat([s.teacher for s in steps]), [len(s.teacher) for s in steps]
    weight = torch.cat(
        [torch.full((n,), w, device=row.device) for n, w in zip(sizes, weights, strict=False)]
    )
    teacher = Teacher(
        batch.last.flatten(0, 1),
        parts.norm,
        parts.lm_head[target_ids],
        batch.logsumexp.flatten(),
        parts.scale,
        parts.softcap,
    )
    hidden = head.norm(torch.cat([s.output for s in steps]))
    out = distill_linear(hidden, head.lm_head.weight, teacher, plan_rows(row), weight)
    hit = target_ids[out.best] == batch.argmax.flatten()[row]
    by_step = zip(*(x.split(sizes) for x in (out.loss, out.alpha, hit)), sizes, strict=True)
    for k, (loss, alpha, hits, count) in enumerate(by_step):
        sums.loss[k], sums.alpha[k], sums.hits[k] = loss.sum(), alpha.sum(), hits.sum()
        sums.count[k] = count
    return out.total, sums
