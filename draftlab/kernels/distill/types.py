"""The teacher, the results and the loss's name, shared by the distillation loss and its kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

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
