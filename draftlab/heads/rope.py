"""RoPE of a head: its types, and the frequencies of each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from draftlab.formatting import is_positive

if TYPE_CHECKING:
    from torch import Tensor

ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
}
"""Types of RoPE that heads have, with their `rope_parameters` beside rope_theta."""
YARN_DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
"""Values of YaRN where a config names none; every program takes these."""


def used_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of a config's `rope_parameters` that a head uses; all of an unknown type."""
    kind = str(rope.get("rope_type", "default"))
    defaults = YARN_DEFAULTS if kind == "yarn" else {}
    used = {"rope_type", "rope_theta", *ROPE_KEYS.get(kind, rope), *defaults}
    given = {name: value for name, value in rope.items() if name in used}
    # Configs of YaRN have null where the default is meant.
    return given | {name: one for name, one in defaults.items() if given.get(name) is None}


def attention_factor(parameters: Mapping[str, Any]) -> float:
    """Return what cosines and sines are multiplied by; 1 but for YaRN (2309.00071, §3.4)."""
    if parameters.get("rope_type") != "yarn":
        return 1.0
    return 0.1 * math.log(max(float(parameters["factor"]), 1.0)) + 1.0


def rope_frequencies(head_dim: int, parameters: dict[str, Any]) -> Tensor:
    """Return the inverse frequencies [head_dim / 2], float32, of transformers' `rope_parameters`.

    Raises:
        KeyError: one of the type's parameters is missing.
        ValueError: the RoPE type is not supported, or a parameter is no positive finite number.
    """
    for name in ("rope_theta", *ROPE_KEYS.get(str(parameters.get("rope_type", "default")), ())):
        if not is_positive(parameters[name]):
            raise ValueError(
                f"rope_parameters.{name}: expected a positive finite number, found "
                f"{parameters[name]!r}"
            )
    import torch  # a config is read without it

    theta = float(parameters["rope_theta"])
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (theta**exponents)
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        return frequencies
    if kind == "linear":
        return frequencies / float(parameters["factor"])
    if kind == "llama3":
        factor, old = float(parameters["factor"]), parameters["original_max_position_embeddings"]
        low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
        if low >= high:
            raise ValueError(
                f"expected low_freq_factor below high_freq_factor, found {low:g}, {high:g}"
            )
        wavelength = 2 * math.pi / frequencies
        # Between the two wavelengths the scaled and unscaled frequencies are mixed linearly.
        smooth = ((old / wavelength - low) / (high - low)).clamp(0, 1)
        return (1 - smooth) * frequencies / factor + smooth * frequencies
    if kind == "yarn":
        old = parameters["original_max_position_embeddings"]
        # Channels that turn at least beta_fast times within the original length keep their
        # frequency, those of at most beta_slow turns are interpolated.
        low, high = (
            head_dim * math.log(old / (2 * math.pi * parameters[name])) / (2 * math.log(theta))
            for name in ("beta_fast", "beta_slow")
        )
        if parameters.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        index = torch.arange(head_dim // 2, dtype=torch.float32)
        kept = 1 - ((index - low) / (high - low or 0.001)).clamp(0, 1)
        return (1 - kept) * frequencies / float(parameters["factor"]) + kept * frequencies
    raise ValueError(f"rope_type {kind!r} is not supported in a head; use {', '.join(ROPE_KEYS)}")
