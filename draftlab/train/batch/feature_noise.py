"""Noise on the features that an EAGLE head is trained with (methods §3).

A function of seed, optimizer step, record and position alone. The host says which records lie
where; the numbers are made on the device, where they are added.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftlab.kernels.noise import Purpose, keyed_bits, keyed_spread

_LENGTH = 512
"""The conversation length at which the largest noise is the setting's own."""


@dataclass(frozen=True)
class StepNoise:
    """What the noise of an optimizer step is made of: ±largest at 512 tokens, seed and step."""

    largest: float
    seed: int
    step: int

    def key(self) -> Tensor:
        """int64 []."""
        seed, step, nowhere = torch.tensor([self.seed, self.step, 0])
        return keyed_bits(seed, step, nowhere, Purpose.FEATURE)

    def scale(self, tokens: int) -> float:
        """The largest noise in a conversation; longer ones get less."""
        return self.largest * _LENGTH / tokens


@dataclass(frozen=True)
class FeatureNoise:
    """The noise on a batch.

    Attributes:
        key: int64 [], of the step. records: int64 [B, S], each slot's record (`prompt_key`).
        scale: float32 [B, S], the largest there is.
    """

    key: Tensor
    records: Tensor
    scale: Tensor

    def values(self, positions: Tensor, size: int) -> Tensor:
        """Uniform float32 [B, S, size] in ±scale; positions: int64 [B, S]."""
        keys = keyed_bits(self.key, self.records, positions, Purpose.FEATURE)
        return keyed_spread(keys, size) * self.scale[..., None]
