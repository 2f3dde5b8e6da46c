"""Training in float64, where two ways to one gradient agree to the last digits on every machine.

In float32 the rounding depends on the processor: on the order in which its products add. A bound
that holds on one machine then fails on another.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from draftlab.heads.layers import Rope


def float64_angles(rope: Rope, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return `Rope.angles` of the tests' heads (theta 10000) in float64."""
    count = len(rope.frequencies)
    frequencies = 10000.0 ** (-torch.arange(count, dtype=torch.float64) / count)
    angle = positions[..., None, None].double() * frequencies
    return angle.cos(), angle.sin()


@pytest.fixture
def float64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make float64 the default dtype of parameters, records and losses, and of rotary angles."""
    monkeypatch.setattr(Rope, "angles", float64_angles)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
