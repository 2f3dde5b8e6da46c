"""Masks of the positions of a record that a head learns from."""

from __future__ import annotations

import torch
from torch import Tensor

NO_TEACHER = (float("nan"), -1)
"""logsumexp and argmax of positions outside `teacher_mask`, where they are not computed."""


def prediction_mask(spans: Tensor) -> Tensor:
    """Return the positions whose tokens a head learns to predict: bool [T].

    w_k(t) = 1 makes x_{t+2+k} a label if x_{t+1} … x_{t+2+k} are in one span (methods §1), so x_j
    is one iff j ≥ 2 and x_{j−1}, x_j are in one span. The target generates a span's first token.
    """
    mask = torch.zeros(len(spans), dtype=torch.bool)
    mask[2:] = (spans[1:-1] == spans[2:]) & (spans[2:] > 0)
    return mask


def teacher_mask(spans: Tensor) -> Tensor:
    """Return the positions whose target distribution a head learns from: bool [T].

    The teacher of the prediction of x_j is the target's distribution at j − 1.
    """
    mask = torch.zeros(len(spans), dtype=torch.bool)
    mask[:-1] = prediction_mask(spans)[1:]
    return mask
