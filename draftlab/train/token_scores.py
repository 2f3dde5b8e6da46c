"""What a head drafts at every position and step, and how the target would judge it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftlab.heads.head import DraftHead
from draftlab.kernels.distill import distill
from draftlab.train.batch.packing import Batch
from draftlab.train.objectives.loss import DraftTeacher, step_of_row

BUFFER = 64 << 20
"""Bytes of the logits that are judged together."""


@dataclass(frozen=True)
class Scores:
    """Of every position t and step k of a batch, [B, S, L] each; 0 where nothing carries loss.

    Attributes:
        asked: bool, whether it carries loss.
        hits: bool, whether x_{t+2+k} was drafted.
        best: bool, whether the target's most probable token was.
        alpha, loss: float32, Σ min(p, q) and the soft cross-entropy.
        ratios: float32, min(1, q(x) / p(x)) of x = x_{t+2+k}; 0 if it is not in the vocabulary.
    """

    asked: Tensor
    hits: Tensor
    best: Tensor
    alpha: Tensor
    loss: Tensor
    ratios: Tensor


@torch.no_grad()
def score(head: DraftHead, target: DraftTeacher, batch: Batch) -> Scores:
    """One unroll; logits exist a chunk of rows at a time, a teacher's once for all its steps."""
    num_rows, width = batch.tokens.shape
    shape = (num_rows * width, len(batch.steps))
    device = batch.tokens.device
    kinds = (torch.bool,) * 3 + (torch.float32,) * 3
    found = [torch.zeros(shape, dtype=kind, device=device) for kind in kinds]
    outputs = list(head.family.objective().forward(head, batch))
    if outputs:
        step = step_of_row([len(o.teacher_index) for o in outputs], device)
        row = torch.cat([o.teacher_index for o in outputs])
        values = _judged(head, target, batch, torch.cat([o.output for o in outputs]), row)
        for whole, value in zip(
            found, (torch.ones_like(row, dtype=torch.bool), *values), strict=True
        ):
            whole[row - 1 - step, step] = value
    return Scores(*(x.view(num_rows, width, -1) for x in found))


def _judged(
    head: DraftHead, target: DraftTeacher, batch: Batch, output: Tensor, row: Tensor
) -> list[Tensor]:
    """hits, best, α, loss and ratio of each row, of outputs [R, H] and their teachers' places."""
    plan, teacher = batch.plan, target.at(batch)
    token, argmax = batch.tokens.flatten()[row + 1], batch.argmax.flatten()[row]
    draft = torch.full((head.config.vocab_size,), -1, device=row.device)
    draft[target.target_ids] = torch.arange(len(target.target_ids), device=row.device)
    draft = draft[token]
    found = [torch.empty_like(row, dtype=kind) for kind in (torch.bool,) * 2 + (torch.float32,) * 3]
    for chunk in plan.chunks(max(2, BUFFER // (4 * len(target.weight)))):
        rows, place = plan.order[chunk.rows], plan.teacher_index[chunk.rows]
        at = plan.positions[chunk.teachers]
        last = target.norm(teacher.last[at].to(target.weight.dtype))
        z = teacher.to_logits(last @ target.weight.t())[place - chunk.teachers.start]
        logsumexp = teacher.logsumexp[plan.positions[place]]
        logits = head.logits(output[rows]).float()
        judged = distill(logits, z, logsumexp)
        pick = draft[rows].clamp(min=0)[:, None]
        log_q = logits.log_softmax(-1).gather(1, pick)[:, 0]
        log_p = z.gather(1, pick)[:, 0] - logsumexp
        drafted = target.target_ids[judged.best]
        ratio = (log_q - log_p).exp().clamp(max=1) * (draft[rows] >= 0)
        values = (
            drafted == token[rows],
            drafted == argmax[rows],
            judged.alpha,
            judged.loss,
            ratio,
        )
        for whole, value in zip(found, values, strict=True):
            whole[rows] = value
    return found
