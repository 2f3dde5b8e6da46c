"""AdamW and its learning rate."""

from __future__ import annotations

import math

import torch
from torch import nn

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
    head: nn.Module, settings: TrainSettings, device: torch.device
) -> torch.optim.Optimizer:
    """Return AdamW over the trained parameters; weight decay applies to matrices only."""
    weights = list(trainable(head).values())
    # A matrix of one row is a learned vector (mask_hidden).
    matrices = [p for p in weights if p.ndim > 1 and len(p) > 1]
    vectors = [p for p in weights if p.ndim == 1 or len(p) == 1]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": settings.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=settings.learning_rate,
        betas=(0.9, settings.beta2),
        fused=device.type == "cuda",
    )
