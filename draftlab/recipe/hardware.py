"""Data sheets of GPUs, for estimates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from draftlab.settings import Settings


@dataclass(frozen=True)
class Gpu:
    """A GPU: memory in GB, bandwidth in TB/s, dense 16-bit matrix products in TFLOP/s."""

    memory: float
    bandwidth: float
    products: float


GPUS = {
    "A100": Gpu(80, 2.0, 312),
    "B200": Gpu(180, 7.7, 2250),
    "H100": Gpu(80, 3.35, 989),
    "H200": Gpu(141, 4.8, 989),
    "L40S": Gpu(48, 0.86, 362),
    "RTX4090": Gpu(24, 1.0, 165),
}


class HardwareSettings(Settings):
    """The machines that a recipe is for. Only the estimates of `--plan` use it."""

    gpu: Literal["A100", "B200", "H100", "H200", "L40S", "RTX4090"] | None = None
    """Their kind of GPU; None: `--plan` estimates sizes without times."""
    gpus: int = Field(default=1, ge=1)
    """Number of GPUs of each."""
    nodes: int = Field(default=1, ge=1)
    """Number of machines, which work together with --ray."""
