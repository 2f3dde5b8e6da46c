"""The optimizer, AdamW or Muon, and the learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from draftlab.heads.head import DraftHead
from draftlab.train.checkpoint import trainable
from draftlab.train.settings import TrainSettings


def learning_rate(step: int, settings: TrainSettings) -> float:
    """Return the learning rate of a step: linear warm-up, then decay to a share of the peak.

    The cosine schedule decays over all other steps; wsd (warm-up, stable, decay) stays at the peak
    and decays linearly over the last steps. The last warm-up step has the peak, and the last step
    of all has `final_learning_rate` of it.
    """
    steps = settings.steps
    warmup = min(max(1, round(settings.warmup * steps)), steps - 1)
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    length = steps - warmup  # of the decay
    if settings.schedule == "wsd":
        length = min(length, max(1, round(settings.decay * steps)))
    left = min(1.0, (steps - 1 - step) / length)
    if settings.schedule == "cosine":
        left = 0.5 * (1 - math.cos(math.pi * left))
    floor = settings.final_learning_rate
    return settings.learning_rate * (floor + (1 - floor) * left)


def new_optimizer(
    head: DraftHead, settings: TrainSettings, device: torch.device
) -> torch.optim.Optimizer:
    """Return the optimizer of the trained parameters; weight decay applies to matrices only.

    Muon steps the matrices of fc and of the layers. Those with a row for each token (embeddings,
    lm_head, the Markov factors) and all vectors have AdamW, as Muon's author recommends.
    """
    weights = list(trainable(head).values())
    # A matrix of one row is a learned vector (mask_hidden).
    matrices = [p for p in weights if p.ndim > 1 and len(p) > 1]
    vectors = [p for p in weights if p.ndim == 1 or len(p) == 1]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    kind: type[torch.optim.AdamW] = torch.optim.AdamW
    if settings.optimizer == "muon":
        kind, config = Muon, head.config
        rate = settings.adamw_learning_rate or settings.learning_rate
        for group in groups:
            group["rate_factor"] = rate / settings.learning_rate
        by_token = {config.vocab_size, config.draft_vocab_size}
        groups[0]["params"] = [p for p in matrices if len(p) in by_token]
        hidden = [p for p in matrices if len(p) not in by_token]
        groups.append({"params": hidden, "weight_decay": settings.weight_decay, "muon": True})
    return kind(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=(0.9, settings.beta2),
        fused=device.type == "cuda",
    )


class Muon(torch.optim.AdamW):
    """Muon for the parameter groups with `muon`, AdamW for the others.

    Muon (Jordan 2024, kellerjordan.github.io/posts/muon) steps a matrix by its momentum's nearest
    semi-orthogonal matrix. Updates are scaled as in Moonlight (Liu et al., arXiv:2502.16982), to
    the size of AdamW's, so that both have one learning rate.

    torch.optim.Muon computes in bfloat16, which takes 40 times as long on CPUs without such
    products, and does not take sharded parameters.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step all parameters that have a gradient; those of Muon's groups lose it."""
        for group in self.param_groups:
            for parameter in group["params"] if group.get("muon") else ():
                if parameter.grad is not None:
                    self._step_matrix(parameter, group["lr"], group["weight_decay"])
                    parameter.grad = None  # which AdamW passes over
        return super().step(closure)

    def _step_matrix(self, parameter: Tensor, learning_rate: float, weight_decay: float) -> None:
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        state["momentum"].lerp_(gradient, 1 - MOMENTUM)
        update = gradient.lerp(state["momentum"], MOMENTUM)  # Nesterov's momentum
        if isinstance(update, DTensor):  # every rank has the whole result, and takes its shard
            whole = orthogonalise(update.full_tensor())
            step = distribute_tensor(
                whole, update.device_mesh, update.placements, src_data_rank=None
            )
        else:
            step = orthogonalise(update)
        parameter.mul_(1 - learning_rate * weight_decay)
        parameter.add_(step, alpha=-learning_rate * 0.2 * math.sqrt(max(parameter.shape)))


MOMENTUM = 0.95
_QUINTIC = 3.4445, -4.7750, 2.0315
"""Coefficients of x, x³ and x⁵ in Muon's Newton–Schulz iteration, which brings singular values into
[0.7, 1.2] in five rounds instead of to 1 in many."""


def orthogonalise(matrix: Tensor) -> Tensor:
    """Return U · S' · Vᵀ of a matrix U · S · Vᵀ [m, n], in its dtype, with S' between 0.7 and 1.2.

    Singular values below about 1/1000 of the Frobenius norm stay smaller.
    """
    a, b, c = _QUINTIC
    x = matrix.bfloat16() if matrix.is_cuda else matrix
    x = x.T if matrix.shape[0] > matrix.shape[1] else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if matrix.shape[0] > matrix.shape[1] else x).to(matrix.dtype)
