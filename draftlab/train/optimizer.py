"""AdamW and its learning rate."""

from __future__ import annotations

import math

import torch
from torch import nn

from draftlab.train.checkpoint import trainable
from draftlab.train.settings import TrainKnobs


def learning_rate(step: int, knobs: TrainKnobs) -> float:
    """Linear warm-up, then down to a share of the peak; a function of the step alone.

    Down goes a cosine over all other steps, or with wsd (warm-up, stable, decay) a straight line
    over the last ones, the peak being kept until then.
    """
    warmup = max(1, round(knobs.warmup * knobs.steps))
    if step < warmup:
        return knobs.learning_rate * (step + 1) / warmup
    floor = knobs.final_learning_rate
    if knobs.schedule == "wsd":
        left = (knobs.steps - step) / max(1, round(knobs.decay * knobs.steps))
        return knobs.learning_rate * (floor + (1 - floor) * min(1.0, left))
    progress = (step - warmup) / max(1, knobs.steps - warmup)
    return knobs.learning_rate * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


def new_optimizer(
    head: nn.Module, knobs: TrainKnobs, device: torch.device
) -> torch.optim.Optimizer:
    """AdamW over what is trained; only matrices decay."""
    weights = list(trainable(head).values())
    # A matrix of one row is a learned vector (mask_hidden).
    matrices = [p for p in weights if p.ndim > 1 and len(p) > 1]
    vectors = [p for p in weights if p.ndim == 1 or len(p) == 1]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": knobs.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=knobs.learning_rate,
        betas=(0.9, knobs.beta2),
        fused=device.type == "cuda",
    )
