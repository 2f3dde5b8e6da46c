"""Scores of a head's drafts at every position and step: hits, α, loss and acceptance ratios."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftlab.heads.head import DraftHead
from draftlab.kernels.distill import distill
from draftlab.kernels.distill.types import at_least_float32
from draftlab.train.batch.packing import Batch
from draftlab.train.objectives.loss import DraftTeacher, step_of_row

BUFFER = 64 << 20
"""Bytes of the logits of one chunk of rows."""


@dataclass(frozen=True)
class TokenScores:
    """Scores at every position t and step k of a batch, [B, S, L] each; 0 at rows without loss.

    Attributes:
        valid: bool, whether the row carries loss.
        hits: bool, whether the draft is x_{t+2+k}.
        best: bool, whether the draft is the target's most probable token.
        alpha, loss: float32, Σ min(p, q) and the soft cross-entropy.
        ratios: float32, min(1, q(x) / p(x)) of x = x_{t+2+k}; 0 if the draft vocabulary lacks x.
    """

    valid: Tensor
    hits: Tensor
    best: Tensor
    alpha: Tensor
    loss: Tensor
    ratios: Tensor


@torch.no_grad()
def score(head: DraftHead, target: DraftTeacher, batch: Batch) -> TokenScores:
    """Return the scores of one forward pass.

    Logits are computed for a chunk of rows at a time, and a teacher's logits once for all steps.
    """
    num_rows, width = batch.tokens.shape
    shape = (num_rows * width, len(batch.steps))
    device = batch.tokens.device
    dtypes = (torch.bool,) * 3 + (torch.float32,) * 3
    scores = [torch.zeros(shape, dtype=dtype, device=device) for dtype in dtypes]
    outputs = list(head.family.objective().forward(head, batch))
    if outputs:
        step = step_of_row([len(o.teacher_index) for o in outputs], device)
        row = torch.cat([o.teacher_index for o in outputs])
        valid = torch.ones_like(row, dtype=torch.bool)
        values = _score_rows(head, target, batch, torch.cat([o.output for o in outputs]), row)
        for tensor, value in zip(scores, (valid, *values), strict=True):
            tensor[row - 1 - step, step] = value
    return TokenScores(*(x.view(num_rows, width, -1) for x in scores))


def _score_rows(
    head: DraftHead, target: DraftTeacher, batch: Batch, output: Tensor, row: Tensor
) -> list[Tensor]:
    """Return hits, best, α, loss and ratio of each row.

    Args:
        output: [R, H], the head's outputs.
        row: int64 [R], flat positions of their teachers.
    """
    plan, teacher = batch.plan, target.at(batch)
    tokens, argmax = batch.tokens.flatten(), batch.argmax.flatten()[row]
    token, previous = tokens[row + 1], tokens[row]
    draft_id = target.draft_index[token]
    dtypes = (torch.bool,) * 2 + (torch.float32,) * 3
    scores = [torch.empty_like(row, dtype=dtype) for dtype in dtypes]
    weight = at_least_float32(target.weight)
    for chunk in plan.chunks(max(2, BUFFER // (4 * len(weight)))):
        rows, index = plan.order[chunk.rows], plan.teacher_index[chunk.rows]
        states = teacher.last[plan.positions[chunk.teachers]]
        last = target.norm(states.to(weight.dtype))
        z = teacher.to_logits(last @ weight.t())[index - chunk.teachers.start]
        logsumexp = teacher.logsumexp[plan.positions[index]]
        logits = head.logits(output[rows], previous[rows]).float()
        out = distill(logits, z, logsumexp)
        column = draft_id[rows].clamp(min=0)[:, None]
        log_q = logits.log_softmax(-1).gather(1, column)[:, 0]
        log_p = z.gather(1, column)[:, 0] - logsumexp
        ratio = (log_q - log_p).exp().clamp(max=1) * (draft_id[rows] >= 0)
        drafted = target.target_ids[out.best]
        hits, best = drafted == token[rows], drafted == argmax[rows]
        for tensor, value in zip(scores, (hits, best, out.alpha, out.loss, ratio), strict=True):
            tensor[rows] = value
    return scores
