"""The optimizer, AdamW or Muon, and the learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from draftlab.heads.head import DraftHead
from draftlab.train.checkpoint import trainable
from draftlab.train.settings import TrainSettings


def learning_rate(step: int, settings: TrainSettings) -> float:
    """Return the learning rate of a step: linear warm-up, then decay to a share of the peak.

    The cosine schedule decays over all other steps; wsd (warm-up, stable, decay) stays at the peak
    and decays linearly over the last steps. The last warm-up step has the peak, as has the only
    step of one, and the last step of several has `final_learning_rate` of it.
    """
    steps = settings.steps
    warmup = min(max(1, round(settings.warmup * steps)), max(1, steps - 1))
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    length = steps - warmup  # of the decay
    if settings.schedule == "wsd":
        length = min(length, settings.decay_steps)
    left = min(1.0, (steps - 1 - step) / length)
    if settings.schedule == "cosine":
        left = 0.5 * (1 - math.cos(math.pi * left))
    floor = settings.final_learning_rate
    return settings.learning_rate * (floor + (1 - floor) * left)


def new_optimizer(
    head: DraftHead, settings: TrainSettings, device: torch.device
) -> torch.optim.Optimizer:
    """Return the optimizer of the trained parameters, which has no weight decay.

    Muon steps the matrices of fc and of the layers; of a tensor [n, m, k], such as that of n
    experts, each matrix by itself. Those with a row for each token (embeddings and
    `DraftHead.draft_tables`) and all vectors have AdamW, as Muon's author recommends.
    """
    scales = {id(p) for p in head.channel_weights()}

    def is_vector(p: Tensor) -> bool:
        # One row or column is a learned vector (mask_hidden).
        return p.ndim < 2 or 1 in p.shape[-2:] or id(p) in scales

    # The order decides the last bits of the norm by which gradients are clipped.
    weights = sorted(trainable(head).values(), key=is_vector)
    groups: list[dict[str, Any]] = [{"params": weights}]
    kind: type[torch.optim.AdamW] = torch.optim.AdamW
    if settings.optimizer == "muon":
        kind = Muon
        rate = settings.adamw_learning_rate or settings.learning_rate
        embeddings = [m for m in head.modules() if isinstance(m, nn.Embedding)]
        by_token = {id(module.weight) for module in (*embeddings, *head.draft_tables())}
        hidden = [p for p in weights if not is_vector(p) and id(p) not in by_token]
        others = [p for p in weights if is_vector(p) or id(p) in by_token]
        groups = [
            {"params": others, "rate_factor": rate / settings.learning_rate},
            {"params": hidden, "muon": True},
        ]
    return kind(
        groups,
        lr=settings.learning_rate,
        betas=(0.9, 0.95),
        weight_decay=0.0,
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
            matrices = [p for p in group["params"] if p.grad is not None and group.get("muon")]
            if matrices:
                self._step_matrices(matrices, group["lr"])
            for parameter in matrices:
                parameter.grad = None  # which AdamW passes over
        return super().step(closure)

    def _step_matrices(self, matrices: list[Tensor], learning_rate: float) -> None:
        for parameter in matrices:
            if "momentum" not in self.state[parameter]:
                self.state[parameter]["momentum"] = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in matrices]
        momenta = [self.state[parameter]["momentum"] for parameter in matrices]
        torch._foreach_lerp_(momenta, gradients, 1 - MOMENTUM)
        # Nesterov's momentum, in place: torch 2.11 has no other `lerp` of sharded tensors.
        torch._foreach_lerp_(gradients, momenta, MOMENTUM)
        # Matrices of one size, upright or not, are one batch: small ones take the GPU less time
        # than the host.
        by_size: dict[tuple[int, ...], list[int]] = {}
        for number, parameter in enumerate(matrices):
            size = *sorted(parameter.shape[-2:]), parameter.numel()
            by_size.setdefault(size, []).append(number)
        for (_, longest, elements), numbers in by_size.items():
            per_batch = max(1, MAX_BATCH // elements)
            for start in range(0, len(numbers), per_batch):
                chosen = numbers[start : start + per_batch]
                steps = _orthogonal_steps([gradients[number] for number in chosen])
                scale = -learning_rate * 0.2 * math.sqrt(longest)
                torch._foreach_add_([matrices[number] for number in chosen], steps, alpha=scale)


def _orthogonal_steps(updates: list[Tensor]) -> list[Tensor]:
    """Return `orthogonalise` of updates [..., m, n] or [..., n, m], sharded as these are."""
    # Every rank has the whole result, and takes its shard.
    whole = [u.full_tensor() if isinstance(u, DTensor) else u for u in updates]
    upright = [x.shape[-2] > x.shape[-1] for x in whole]
    wide = [x.mT if tall else x for x, tall in zip(whole, upright, strict=True)]
    batch = torch.stack([x.reshape(-1, *x.shape[-2:]) for x in wide])
    results = orthogonalise(batch.flatten(0, 1)).view_as(batch)
    steps = [
        (x.mT if tall else x).reshape(like.shape)
        for x, tall, like in zip(results, upright, whole, strict=True)
    ]
    return [
        distribute_tensor(x, u.device_mesh, u.placements, src_data_rank=None)
        if isinstance(u, DTensor)
        else x
        for x, u in zip(steps, updates, strict=True)
    ]


MOMENTUM = 0.95
_QUINTIC = 3.4445, -4.7750, 2.0315
"""Coefficients of x, x³ and x⁵ in Muon's Newton–Schulz iteration, which brings singular values into
[0.7, 1.2] in five rounds instead of to 1 in many."""
MAX_BATCH = 1 << 24
"""Elements of the matrices that are made orthogonal together, which takes memory."""


def orthogonalise(matrices: Tensor) -> Tensor:
    """Return U · S' · Vᵀ of matrices U · S · Vᵀ [b, m, n], in their dtype, with S' in [0.7, 1.2].

    Singular values below about 1/1000 of a matrix's Frobenius norm stay smaller.
    """
    a, b, c = _QUINTIC
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.to(matrices.dtype)
