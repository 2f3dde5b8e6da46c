"""The distillation loss over the draft vocabulary (methods §2), on logits: the eager reference.

`distill_linear.py` computes it from hidden states, a chunk of rows at a time, and has each chunk
judged by `distill_rows_reference` or, on a GPU, by its kernel (`distill_triton.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from draftlab.kernels.distill_plan import RowPlan

Loss = Literal["soft_ce", "kl", "lk"]


@dataclass(frozen=True)
class Distilled:
    """Per row: loss, expected acceptance α = Σ min(p, q) and argmax of q, of which the last two
    never have a gradient.
    """

    loss: Tensor
    alpha: Tensor
    best: Tensor


def distill(
    draft_logits: Tensor,
    teacher_logits: Tensor,
    logsumexp: Tensor,
    *,
    loss: Loss = "soft_ce",
    share: Tensor | None = None,
) -> Distilled:
    """With p = exp(z − logsumexp over the whole vocabulary), not renormalised, and q the head's:

    - soft_ce: −Σ_D p log q.
    - kl: Σ_D p (log p − log q), the same but for what the head cannot change.
    - lk: share · kl + (1 − share)(1 − α), where α has a gradient (see `lk_share`).

    Args:
        draft_logits: the head's [R, D].
        teacher_logits: the target's at the draft vocabulary, z, float32 [R, D].
        logsumexp: of the target's whole distribution, float32 [R].
        share: lk's, [R].

    Raises:
        ValueError: if `share` is not given just for lk.
    """
    check_share(loss, share)
    log_p = teacher_logits - logsumexp[:, None]
    p = log_p.exp()
    log_q = wide(draft_logits).log_softmax(-1)
    alpha = p.minimum((log_q if loss == "lk" else log_q.detach()).exp()).sum(-1)
    surprise = log_q if loss == "soft_ce" else log_q - log_p
    value = -(p * surprise).sum(-1)
    if share is not None:
        value = share * value + (1 - share) * (1 - alpha)
    return Distilled(value, alpha.detach(), draft_logits.detach().argmax(-1))


def lk_share(alpha: Tensor, step: Tensor, num_steps: int) -> Tensor:
    """Each row's share of kl in lk: exp(−3 ᾱ), ᾱ the mean α of the row's unrolled step.

    The α of the rows themselves come from a `distill_linear` under `torch.no_grad`.

    Args:
        alpha: [R]. step: int64 [R], below num_steps.
    """
    # [R, L] in place of index_add, whose sums on a GPU have no fixed order.
    of_step = step[:, None] == torch.arange(num_steps, device=step.device)
    mean = torch.where(of_step, alpha[:, None], 0).sum(0) / of_step.sum(0).clamp(min=1)
    return (-3 * mean).exp()[step]


@dataclass(frozen=True)
class Teacher:
    """The target, as far as it teaches; nothing of it has a gradient.

    Attributes:
        last: [P, Ht], its last state at every position, before the final norm.
        norm: its final norm; None: `last` is normed.
        weight: [D, Ht], its lm_head's rows of the draft vocabulary.
        logsumexp: float32 [P], of the whole vocabulary.
        scale: factor on the logits.
        softcap: logits become softcap · tanh(logits / softcap) when given.
    """

    last: Tensor
    norm: Callable[[Tensor], Tensor] | None
    weight: Tensor
    logsumexp: Tensor
    scale: float = 1.0
    softcap: float | None = None

    def finish(self, product: Tensor) -> Tensor:
        """Logits, float32 or wider, of the plain product with `weight`."""
        logits = wide(product) * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def distill_rows_reference(
    logits: Tensor,
    teacher_logits: Tensor,
    rows: slice,
    plan: RowPlan,
    teacher: Teacher,
    weight: Tensor,
    share: Tensor | None,
    loss: Loss,
    gradients: bool,
    out: Distilled,
) -> None:
    """Judges a chunk: fills `out` at its rows; with `gradients`, `logits` become those of Σ w·ℓ.

    Args:
        logits: [n, D], the head's, of the plan's `rows`.
        teacher_logits: [c, D], the plain products (see `Teacher.finish`), in order of position.
        weight, share: [R], of all rows, in their own order.
    """
    row, own = plan.order[rows], plan.place[rows]
    with torch.set_grad_enabled(gradients):
        x = logits.detach().requires_grad_(gradients)
        found = distill(
            x,
            teacher.finish(teacher_logits)[own - own[0]],
            teacher.logsumexp[plan.positions[own]],
            loss=loss,
            share=None if share is None else share[row],
        )
        if gradients:
            (gradient,) = torch.autograd.grad(weighted(weight[row], found.loss), x)
            logits.copy_(gradient.masked_fill_((weight[row] == 0)[:, None], 0))
    for name, values in vars(found).items():
        getattr(out, name)[row] = values.detach()


def weighted(weight: Tensor, loss: Tensor) -> Tensor:
    """Σ weight · loss over the rows that have a weight."""
    return torch.where(weight != 0, weight * loss, 0).sum()


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What values of this dtype are summed in."""
    return torch.float32 if dtype.itemsize < 4 else dtype


def wide(x: Tensor) -> Tensor:
    """x, float32 at least."""
    return x.to(wide_dtype(x.dtype))


def check_share(loss: Loss, share: Tensor | None) -> None:
    """Raises ValueError if `share` is not given just for lk."""
    if (loss == "lk") != (share is not None):
        found = "none" if share is None else f"one for {loss}"
        raise ValueError(f"expected a `share` for loss lk and for no other, found {found}")
