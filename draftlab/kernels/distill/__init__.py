"""The distillation loss over the draft vocabulary, on logits (docs/methods.md §2).

With p the target's distribution, p = exp(z − logsumexp over the whole vocabulary), which is not
renormalized over the draft vocabulary D, and q the head's:

    soft_ce  −Σ_D p log q
    lk       λ · Σ_D p (log p − log q) + (1 − λ) · (1 − α),  α = Σ_D min(p, q)
    ce_l1    a · (−log q(x)) + b · ‖q − p‖₁,  ‖q − p‖₁ = 2 (1 − α),  x the data's token

`distill/linear.py` computes it from hidden states, a chunk of rows at a time; on a GPU a kernel
(`distill/triton.py`) takes the place of `distill_rows`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from draftlab.kernels.dispatch import triton_operator
from draftlab.kernels.distill.plan import RowPlan

Loss = Literal["soft_ce", "lk", "ce_l1"]


@dataclass(frozen=True)
class Labels:
    """The data tokens that rows predict, and the weights of the loss ce_l1's two terms.

    Attributes:
        ids: int64 [R], ids of the draft vocabulary; −1 where it lacks the token.
        cross_entropy: weight of −log q of the label; l1: of ‖q − p‖₁.
    """

    ids: Tensor
    cross_entropy: float
    l1: float


@dataclass(frozen=True)
class Distilled:
    """The loss's values, one per row. α and the argmax never have a gradient.

    Attributes:
        loss: [R].
        alpha: [R], expected acceptance α = Σ min(p, q).
        best: int64 [R], argmax of q.
    """

    loss: Tensor
    alpha: Tensor
    best: Tensor


@dataclass(frozen=True)
class Teacher:
    """The target's final states and the weights that give its draft-vocabulary logits; no gradient.

    Attributes:
        last: [P, Ht], its last hidden state at every position, before the final norm.
        norm: its final norm; None: `last` is normed.
        weight: [D, Ht], its lm_head's rows of the draft vocabulary.
        logsumexp: float32 [P], of the logits over the whole vocabulary.
        scale: factor of the logits.
        softcap: logits become softcap · tanh(logits / softcap) when given.
    """

    last: Tensor
    norm: Callable[[Tensor], Tensor] | None
    weight: Tensor
    logsumexp: Tensor
    scale: float = 1.0
    softcap: float | None = None

    def to_logits(self, product: Tensor) -> Tensor:
        """Return logits, at least float32, of a product of states with `weight`."""
        logits = at_least_float32(product) * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that values of this dtype are summed in: at least float32."""
    return torch.float32 if dtype.itemsize < 4 else dtype


def at_least_float32(x: Tensor) -> Tensor:
    """Return x, in float32 if it is narrower."""
    return x.to(sum_dtype(x.dtype))


def check_loss_arguments(loss: Loss, kl_weight: Tensor | None, labels: Labels | None) -> None:
    """Raise ValueError unless lk has a `kl_weight`, ce_l1 has `labels`, and no other loss has."""
    for name, value, owner in (("kl_weight", kl_weight, "lk"), ("labels", labels, "ce_l1")):
        if (loss == owner) != (value is not None):
            found = "none" if value is None else f"some for {loss}"
            raise ValueError(f"expected {name} for loss {owner} and for no other, found {found}")


def distill(
    draft_logits: Tensor,
    teacher_logits: Tensor,
    logsumexp: Tensor,
    *,
    loss: Loss = "soft_ce",
    kl_weight: Tensor | None = None,
    labels: Labels | None = None,
) -> Distilled:
    """Return the loss, α and the head's argmax of each row.

    Args:
        draft_logits: the head's [R, D].
        teacher_logits: the target's over the draft vocabulary, z, float32 [R, D].
        logsumexp: of the target's logits over the whole vocabulary, float32 [R].
        kl_weight: λ of lk, [R] (see `lk_weight`).
        labels: of ce_l1. A token outside the draft vocabulary has no cross-entropy.

    Raises:
        ValueError: `kl_weight` or `labels` are not those that the loss needs.
    """
    check_loss_arguments(loss, kl_weight, labels)
    log_p = teacher_logits - logsumexp[:, None]
    p = log_p.exp()
    log_q = at_least_float32(draft_logits).log_softmax(-1)
    alpha = p.minimum((log_q.detach() if loss == "soft_ce" else log_q).exp()).sum(-1)
    if labels is not None:
        known = labels.ids >= 0
        log_likelihood = log_q.gather(1, labels.ids.clamp(min=0)[:, None])[:, 0]
        cross_entropy = -torch.where(known, log_likelihood, 0)
        value = labels.cross_entropy * cross_entropy + 2 * labels.l1 * (1 - alpha)
        return Distilled(value, alpha.detach(), draft_logits.detach().argmax(-1))
    log_ratio = log_q if loss == "soft_ce" else log_q - log_p
    value = -(p * log_ratio).sum(-1)
    if kl_weight is not None:
        value = kl_weight * value + (1 - kl_weight) * (1 - alpha)
    return Distilled(value, alpha.detach(), draft_logits.detach().argmax(-1))


def lk_weight(alpha: Tensor, step: Tensor, num_steps: int) -> Tensor:
    """Return λ of lk for each unrolled step [L]: exp(−3 ᾱ), with ᾱ the mean α of its rows, or of
    all steps' rows if it has none.

    The rows' α come from a `distill_linear` under `torch.no_grad`.

    Args:
        alpha: [R].
        step: int64 [R]; rows with `num_steps` are not counted.
    """
    # [R, L] in place of index_add, whose sums on a GPU have no fixed order.
    of_step = step[:, None] == torch.arange(num_steps, device=step.device)
    count, total = of_step.sum(0), torch.where(of_step, alpha[:, None], 0).sum(0)
    mean_of_all = total.sum() / count.sum().clamp(min=1)
    mean = torch.where(count > 0, total / count.clamp(min=1), mean_of_all)
    return (-3 * mean).exp()


def weighted(weight: Tensor, loss: Tensor) -> Tensor:
    """Return Σ weight · loss over the rows whose weight is not 0."""
    return torch.where(weight != 0, weight * loss, 0).sum()


@triton_operator("distill.triton")
def distill_rows(
    logits: Tensor,
    teacher_logits: Tensor,
    rows: slice,
    plan: RowPlan,
    teacher: Teacher,
    weight: Tensor,
    kl_weight: Tensor | None,
    labels: Labels | None,
    loss: Loss,
    gradients: bool,
    out: Distilled,
) -> None:
    """Fill `out` at a chunk's rows; with `gradients`, overwrite `logits` by those of Σ w·ℓ.

    On a GPU both logits are columns [:D] of contiguous buffers of one width, whose other columns
    may be overwritten.

    Args:
        logits: [n, D], the head's, of the plan's `rows`.
        teacher_logits: [c, D], the plain products (see `Teacher.to_logits`), by position.
        weight, kl_weight, labels: of all R rows, in their original order.
    """
    row, teacher_index = plan.order[rows], plan.teacher_index[rows]
    with torch.set_grad_enabled(gradients):
        x = logits.detach().requires_grad_(gradients)
        result = distill(
            x,
            teacher.to_logits(teacher_logits)[teacher_index - teacher_index[0]],
            teacher.logsumexp[plan.positions[teacher_index]],
            loss=loss,
            kl_weight=None if kl_weight is None else kl_weight[row],
            labels=None if labels is None else replace(labels, ids=labels.ids[row]),
        )
        if gradients:
            (gradient,) = torch.autograd.grad(weighted(weight[row], result.loss), x)
            logits.copy_(gradient.masked_fill_((weight[row] == 0)[:, None], 0))
    for name, values in vars(result).items():
        getattr(out, name)[row] = values.detach()
