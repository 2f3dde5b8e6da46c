"""The distillation loss over the draft vocabulary (METHODS §2): the eager reference."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Distilled:
    """Per row: loss, expected acceptance α = Σ min(p, q) (no gradient), and argmax of q."""

    loss: Tensor
    alpha: Tensor
    best: Tensor


def distill(draft_logits: Tensor, teacher_logits: Tensor, logsumexp: Tensor) -> Distilled:
    """ℓ = −Σ_D p log q, with p = exp(z − logsumexp over the whole vocabulary), not renormalised.

    Args:
        draft_logits: the head's [R, D].
        teacher_logits: the target's at the draft vocabulary, z, float32 [R, D].
        logsumexp: of the target's whole distribution, float32 [R].
    """
    p = (teacher_logits - logsumexp[:, None]).exp()
    log_q = draft_logits.float().log_softmax(-1)
    alpha = p.minimum(log_q.detach().exp()).sum(-1)
    return Distilled(-(p * log_q).sum(-1), alpha, draft_logits.detach().argmax(-1))
