"""The loss that all objectives share: outputs at loss rows, their teachers, and reported sums."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftlab.heads.head import DraftHead
from draftlab.kernels.distill import (
    Labels,
    Loss,
    Teacher,
    at_least_float32,
    lk_weight,
    sum_dtype,
    weighted,
)
from draftlab.kernels.distill.linear import distill_linear
from draftlab.kernels.sampling.types import draft_index
from draftlab.target_model.parts import TargetParts
from draftlab.train.batch.loss_rows import StepRows
from draftlab.train.batch.packing import Batch
from draftlab.train.objectives.selector import select


@dataclass(frozen=True)
class StepOutput:
    """The head's output [n, H] of step or depth k at the n rows that carry loss, and the flat
    positions b·S + t + 1 + k of their teachers, int64 [n].
    """

    output: Tensor
    teacher_index: Tensor


@dataclass(frozen=True)
class LossTerms:
    """The loss of a row: distillation · ℓ, with `regression` plus smooth L1 (methods §2, §3).

    Smooth L1 is a mean over H. It compares the head's output, which is the feature of the next
    draft, with the normed state of its teacher, which would be the feature if the target had
    written this token.

    Attributes:
        loss: ℓ of `kernels/distill/`; "lk" weighs its terms by the mean α of the batch's steps.
        acceptance_weighting: share of a row's weight that is multiplied by the probability that its
            draft is reached.
        cross_entropy, l1: weights of ce_l1's terms.
        confidence: weight of the binary cross-entropy between a confidence head and α.
        selector: weight of the cross-entropy of a candidate selector (`objectives/selector.py`).
    """

    loss: Loss = "soft_ce"
    distillation: float = 1.0
    regression: bool = False
    acceptance_weighting: float = 0.0
    cross_entropy: float = 0.0
    l1: float = 0.0
    confidence: float = 0.0
    selector: float = 0.0


SOFT_CE = LossTerms()
LK_TEACHERS = 256
"""Teachers, at least, whose rows give the mean α of lk's steps, to about 0.02, or 0.06 at depths of
a parallel head with few rows. All rows would cost a third of a small head's step."""


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """Return x [B, S, …] at positions index [B, R]: [B, R, …]."""
    index = index.view(*index.shape, *[1] * (x.ndim - 2))
    return x.gather(1, index.expand(-1, -1, *x.shape[2:]))


def row_starts(starts: Tensor, rows: StepRows) -> Tensor:
    """Return the document start of each row, int64 [B, R], from those of positions [B, S]; it is S
    for padding rows, which see no key.
    """
    result = starts.gather(1, rows.index)
    if len(rows.valid_rows) == rows.index.numel():
        return result
    padded = torch.full_like(result, starts.shape[1]).flatten()
    return padded.index_copy_(0, rows.valid_rows, result.flatten()[rows.valid_rows]).view_as(result)


class Sums(NamedTuple):
    """Sums over rows, per step [L]: loss, α, top-1 hits of the target's argmax, and their count."""

    loss: Tensor
    alpha: Tensor
    hits: Tensor
    count: Tensor

    @classmethod
    def zeros(cls, num_steps: int, device: torch.device) -> Sums:
        """Return sums of no rows."""
        return cls(*(torch.zeros(num_steps, device=device) for _ in range(4)))


@dataclass(frozen=True)
class DraftTeacher:
    """The target's final norm, and the rows of its lm_head for the draft vocabulary.

    Attributes:
        weight: [D, Ht], rows of lm_head. The norm is float32 or wider whatever the weight is.
        target_ids: int64 [D]. draft_index: int64 [V], its inverse; −1 outside.
        norm, scale, softcap: as in `TargetParts`.
    """

    norm: Callable[[Tensor], Tensor]
    weight: Tensor
    target_ids: Tensor
    draft_index: Tensor
    scale: float
    softcap: float | None

    @classmethod
    def of(
        cls, parts: TargetParts, head: DraftHead, dtype: torch.dtype | None = None
    ) -> DraftTeacher:
        """Return the teacher of a head, on its device, in `dtype` (None: that of `parts`)."""
        device, dtype = head.d2t.device, dtype or parts.lm_head.dtype
        ids = head.target_ids(torch.arange(len(head.d2t), device=device))
        # Select rows before moving them: lm_head may be large, and on another device.
        rows = parts.lm_head[ids.to(parts.lm_head.device)].to(device, dtype)
        # A copy, since `Module.to` works in place and a model in use may own this norm.
        norm = copy.deepcopy(parts.norm).to(device, sum_dtype(dtype))
        index = draft_index(ids, len(parts.lm_head)).long()
        return cls(norm, rows, ids, index, parts.scale, parts.softcap)

    @classmethod
    def for_training(cls, parts: TargetParts, head: DraftHead, dtype: torch.dtype) -> DraftTeacher:
        """Return the teacher of a head that is trained with products in `dtype`: in the target's
        dtype if it is the same, else in float32. A frozen lm_head shares its memory.
        """
        kept = dtype if parts.lm_head.dtype == dtype else torch.float32
        teacher = cls.of(parts, head, kept)
        if not head.lm_head.weight.requires_grad:
            head.lm_head.weight = nn.Parameter(teacher.weight, requires_grad=False)
        return teacher

    def at(self, batch: Batch) -> Teacher:
        """Return the teacher at the positions of a batch."""
        last, logsumexp = batch.last.flatten(0, 1), batch.logsumexp.flatten()
        return Teacher(last, self.norm, self.weight, logsumexp, self.scale, self.softcap)


def weighted_loss(
    outputs: Iterable[StepOutput],
    head: DraftHead,
    target: DraftTeacher,
    batch: Batch,
    weights: Sequence[float],
    terms: LossTerms = SOFT_CE,
    *,
    fp8: bool = False,
) -> tuple[Tensor, Sums]:
    """Return Σ_k weight_k Σ ℓ over the rows that carry loss, and the sums to report.

    The loss is not yet divided by N_0. A token outside the draft vocabulary stays in every
    denominator as a miss. With `fp8` a trained lm_head multiplies in 8 bits (`distill_linear`).
    """
    steps, device = list(outputs), batch.tokens.device
    if not steps:
        return torch.zeros((), device=device), Sums.zeros(len(batch.steps), device)
    row, sizes = torch.cat([s.teacher_index for s in steps]), [len(s.teacher_index) for s in steps]
    empty = len(batch.steps) - len(sizes)
    weight = per_row(weights, sizes, device)
    if batch.padding is not None:
        weight = torch.where(batch.padding.valid, weight, 0)
    teacher = target.at(batch)
    output, plan = torch.cat([s.output for s in steps]), batch.plan
    tokens, kl_weight = batch.tokens.flatten(), None
    with torch.autocast(output.device.type, enabled=False):  # autocast widens the norm on a GPU
        normed = head.normed(output)
        hidden, trained, frozen = head.loss_product(normed, tokens[row])
    labels = None
    if terms.loss == "ce_l1":
        labels = Labels(target.draft_index[tokens[row + 1]], terms.cross_entropy, terms.l1)
    if terms.loss == "lk" or terms.acceptance_weighting:
        step = step_of_row(sizes, device)
        if batch.padding is None:
            rows, some = plan.thinned(len(row) if terms.acceptance_weighting else LK_TEACHERS)
            counted_step = step[rows]
        else:
            rows, some, counted = plan.thinned_to_fixed(LK_TEACHERS, len(sizes))
            counted &= batch.padding.valid[rows]
            counted_step = torch.where(counted, step[rows], len(sizes))
        with torch.no_grad():
            found = distill_linear(
                hidden[rows], trained, teacher, some, weight[rows], frozen=frozen
            )
        if terms.loss == "lk":
            kl_weight = lk_weight(found.alpha, counted_step, len(sizes))[step]
        if share := terms.acceptance_weighting:
            anchor, slots = row - 1 - step, batch.tokens.numel()
            reach = reach_probability(found.alpha, step, anchor, len(sizes), slots)
            weight = torch.where(weight != 0, weight * (1 - share + share * reach), 0)  # no 0 · NaN
    out = distill_linear(
        hidden,
        trained,
        teacher,
        plan,
        terms.distillation * weight,
        loss=terms.loss,
        kl_weight=kl_weight,
        labels=labels,
        frozen=frozen,
        fp8=fp8 and frozen is None,
    )
    total, value = out.total, terms.distillation * out.loss
    alpha, best = out.alpha, out.best
    if terms.confidence:
        logits = at_least_float32(head.confidence_logits(normed, hidden[:, normed.shape[1] :]))
        distance = F.binary_cross_entropy_with_logits(logits, out.alpha, reduction="none")
        total = total + terms.confidence * weighted(weight, distance)
        value = value + terms.confidence * distance.detach()
    if terms.selector:
        label = batch.argmax.flatten()[row]
        loss, alpha, best = select(head, normed, tokens[row], label, teacher, row)
        total = total + terms.selector * weighted(weight, loss)
        value = value + terms.selector * loss.detach()
    if terms.regression:
        state = target.norm(teacher.last[row].to(sum_dtype(target.weight.dtype)))
        distance = F.smooth_l1_loss(output.to(state.dtype), state, reduction="none").mean(-1)
        total = total + weighted(weight, distance)
        value = value + distance.detach()
    hit = target.target_ids[best] == batch.argmax.flatten()[row]
    values = torch.stack([value, alpha, hit, torch.ones_like(value)])
    if batch.padding is not None:
        values = torch.where(batch.padding.valid, values, 0)
    by_step = (x.sum(1) for x in values.split(sizes, 1))
    return total, Sums(*torch.stack([*by_step, *[value.new_zeros(4)] * empty], 1))


def reach_probability(
    alpha: Tensor, step: Tensor, anchor: Tensor, num_steps: int, slots: int
) -> Tensor:
    """Return the probability that all drafts of a row's anchor before the row's draft are accepted.

    The expected number of accepted drafts is Σ_k Π_{j≤k} α_j. Its derivative by α_k has this
    probability as a factor; the other factor is about later drafts. The value is an estimate, since
    the recorded tokens stand in for the accepted ones.

    Args:
        alpha, step: of the rows [R], below num_steps. anchor: int64 [R], flat, below `slots`; an
            anchor occurs at most once in a step.
    """
    passed = alpha.new_ones(num_steps + 1, slots)
    passed[step + 1, anchor] = alpha
    return passed.cumprod(0)[step, anchor]


def step_of_row(sizes: Sequence[int], device: torch.device) -> Tensor:
    """Return the step of each row, int64 [R], of rows sorted by step."""
    return per_row(range(len(sizes)), sizes, device)


def per_row(values: Sequence[float], sizes: Sequence[int], device: torch.device) -> Tensor:
    """Return each step's value at its rows [R], int64 or float32; nothing is copied to the device,
    so that a CUDA graph can have it.
    """
    parts = (torch.full((n,), v, device=device) for n, v in zip(sizes, values, strict=False))
    return torch.cat([*parts])
