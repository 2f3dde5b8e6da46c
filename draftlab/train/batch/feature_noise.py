"""Noise on the features that an EAGLE head is trained with (docs/methods.md §3).

The noise is a pure function of seed, optimizer step, record and position. The host only sends keys;
the device that adds the noise also computes it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftlab.kernels.noise import Purpose, keyed_bits, keyed_spread

_REFERENCE_LENGTH = 512
"""Tokens of a conversation whose noise is within ±largest."""


@dataclass(frozen=True)
class StepNoise:
    """The noise settings of an optimizer step: ±largest at 512 tokens, seed and step."""

    largest: float
    seed: int
    step: int

    def key(self) -> Tensor:
        """Return the step's key: int64 []."""
        seed, step, no_position = torch.tensor([self.seed, self.step, 0])
        return keyed_bits(seed, step, no_position, Purpose.FEATURE)

    def scale(self, num_tokens: int) -> float:
        """Return the largest noise in a conversation; longer conversations get less."""
        return self.largest * _REFERENCE_LENGTH / num_tokens


@dataclass(frozen=True)
class FeatureNoise:
    """The noise on a batch.

    Attributes:
        key: int64 [], of the optimizer step.
        records: int64 [B, S], the `prompt_key` of the record at each position.
        scale: float32 [B, S], the largest noise at each position.
    """

    key: Tensor
    records: Tensor
    scale: Tensor

    def values(self, positions: Tensor, size: int) -> Tensor:
        """Return uniform noise in ±scale, float32 [B, S, size]; positions: int64 [B, S]."""
        keys = keyed_bits(self.key, self.records, positions, Purpose.FEATURE)
        return keyed_spread(keys, size) * self.scale[..., None]
