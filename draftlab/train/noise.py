"""Noise on the features that an EAGLE head is trained with (METHODS §3)."""

from __future__ import annotations

import torch
from torch import Tensor

from draftlab.data.store import Record
from draftlab.kernels.noise import Purpose, keyed_bits, prompt_key

_LENGTH = 512
"""The conversation length at which the largest noise is the knob's own."""


def feature_noise(record: Record, *, largest: float, seed: int, step: int) -> tuple[Tensor, float]:
    """Keys int64 [T] and scale of the noise on a record's features.

    Uniform in ±largest · 512 / T (longer conversations get less), a function of seed, optimizer
    step, record and position alone.
    """
    at = torch.arange(len(record.tokens))
    key = keyed_bits(torch.tensor(seed), torch.tensor(step), at[:1] * 0, Purpose.FEATURE)
    keys = keyed_bits(key, torch.tensor(prompt_key(record.id)), at, Purpose.FEATURE)
    return keys, largest * _LENGTH / len(at)
