"""The loss of a candidate selector: the choice among a slot's most probable tokens (methods §7.5).

The selector's score of a token given the one before it is trained by cross-entropy over the
candidates, with the data token before it. Its label is the target's most probable token, which
takes the place of the last candidate if it is not among them. The candidates' logits are computed
a chunk of rows at a time and again in the backward pass, so that no tensor of all logits is kept.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from draftlab.heads.dflash2 import Dflash2Head, transition_scores
from draftlab.kernels.distill import Teacher, at_least_float32, sum_dtype

BUFFER = {"cuda": 256 << 20, "cpu": 8 << 20}
"""Bytes of the logits of one chunk of rows."""


class Selected(NamedTuple):
    """The loss of R rows, with a gradient, and what the selector drafts after the data token: the
    expected acceptance Σ min(p, q), and the token of the highest score, int64; each [R].
    """

    loss: Tensor
    alpha: Tensor
    best: Tensor


def select(
    head: Dflash2Head,
    normed: Tensor,
    previous: Tensor,
    label: Tensor,
    teacher: Teacher,
    row: Tensor,
) -> Selected:
    """Return the selector's loss and drafts.

    Args:
        normed: [R, H], the input of lm_head. previous: int64 [R], the token before.
        label: int64 [R], the target's most probable token.
        row: int64 [R], the rows' positions in the teacher.
    """
    selector, weight = head.candidate_selector, head.lm_head.weight
    height = max(1, BUFFER.get(normed.device.type, BUFFER["cpu"]) // (4 * len(weight)))
    candidates, values, log_p = [], [], []
    for part, gold, rows in zip(
        normed.split(height), label.split(height), row.split(height), strict=True
    ):
        with torch.no_grad():
            chosen = F.linear(part, weight.to(part.dtype)).topk(selector.top_k, -1).indices
            chosen = torch.cat([chosen, gold[:, None]], 1)
            last = teacher.last[rows].to(sum_dtype(teacher.weight.dtype))
            state = last if teacher.norm is None else teacher.norm(last)
            z = teacher.to_logits(_products(state, teacher.weight, chosen))
            log_p.append(z - teacher.logsumexp[rows, None])
        candidates.append(chosen)
        values.append(checkpoint(_products, part, weight, chosen, use_reentrant=False))
    chosen, label_index = torch.cat(candidates), selector.top_k
    context = selector.predecessor_codebook(previous) * selector.hidden_projection(normed)
    added = transition_scores(context, selector.successor_codebook(chosen))
    scores = at_least_float32(head.shaped(torch.cat(values))) + at_least_float32(added)
    served, found = scores[:, :-1], chosen[:, :-1] == label[:, None]
    # The label is a column of its own, which replaces the last candidate or is left out.
    has_label = found.any(1)
    left_out = torch.zeros_like(scores, dtype=torch.bool)
    left_out[:, -1], left_out[:, -2] = has_label, ~has_label
    index = torch.where(has_label, found.int().argmax(1), label_index)
    loss = F.cross_entropy(scores.masked_fill(left_out, -torch.inf), index, reduction="none")
    with torch.no_grad():
        p, q = torch.cat(log_p)[:, :-1].exp(), served.softmax(1)
        best = chosen.gather(1, served.argmax(1, keepdim=True))[:, 0]
        return Selected(loss, torch.minimum(p, q.to(p.dtype)).sum(1), best)


def _products(states: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
    """Return the products [R, C] of states [R, H] with the rows of tokens [R, C] in a table."""
    return (weight[tokens].to(states.dtype) @ states[..., None])[..., 0]
