"""Keyed noise: randomness as a pure function of (seed, prompt, position, purpose, token).

No generator, no state: the same key gives the same number in any slot, batch or order of arrival
(methods §5). Different purposes give independent numbers for the same position, so a draft never
shares its noise with the verifier that judges it.
"""

from __future__ import annotations

import hashlib
from enum import IntEnum

import torch
from torch import Tensor


class Purpose(IntEnum):
    """What a number is drawn for."""

    EMIT = 1  # the token that the verifier emits at a position: recovered, bonus or undrafted
    ACCEPT = 2  # the acceptance test of the draft at a position
    DRAFT = 3  # the draft token proposed for a position
    FEATURE = 4  # the feature of a position, in training


def prompt_key(request_id: str) -> int:
    """A request id as a signed 64-bit key."""
    return int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:8], "little", signed=True)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64, a bijection of 64-bit words that scatters every bit."""
    x = (x ^ _shift(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ _shift(x, 27)) * -0x6B2FB644ECCEEE15
    return x ^ _shift(x, 31)


def keyed_bits(seeds: Tensor, prompts: Tensor, positions: Tensor, purpose: Purpose) -> Tensor:
    """64 well-mixed bits, int64, for broadcastable int64 keys."""
    golden = -0x61C8864680B583EB
    x = _mix(seeds + golden)
    x = _mix(x ^ prompts)
    return _mix(x ^ (positions * 8 + int(purpose) + golden))


def keyed_uniform(seeds: Tensor, prompts: Tensor, positions: Tensor, purpose: Purpose) -> Tensor:
    """Uniform float64 in [0, 1), one per key."""
    return _shift(keyed_bits(seeds, prompts, positions, purpose), 11).double() * 2.0**-53


def keyed_exponential(
    seeds: Tensor, prompts: Tensor, positions: Tensor, purpose: Purpose, num_tokens: int
) -> Tensor:
    """Exponential(1) float32 [..., num_tokens] for keys [...].

    Small values decide a race, so they carry full relative precision: −log(1 − v), with
    v = (i + ½) · 2⁻³².
    """
    keys = keyed_bits(seeds, prompts, positions, purpose)
    tokens = torch.arange(1, num_tokens + 1, device=keys.device)
    bits = _shift(_mix(keys[..., None] ^ (tokens * -0x61C8864680B583EB)), 32)
    v = ((bits.double() + 0.5) * 2.0**-32).float()
    return -torch.log1p(-v.clamp(max=1 - 2.0**-24))


def keyed_spread(keys: Tensor, size: int) -> Tensor:
    """Uniform float32 [..., size] in [−1, 1) for well-mixed int64 keys [...] (`keyed_bits`)."""
    places = torch.arange(1, size + 1, device=keys.device) * -0x61C8864680B583EB
    return _shift(_mix(keys[..., None] ^ places), 40).float() * 2.0**-23 - 1


def race(weights: Tensor, exponential: Tensor) -> Tensor:
    """Index drawn with probability ∝ weights [..., V] ≥ 0: argmin of exponential / weight.

    Weights need not sum to one. Ties go to the lowest index.
    """
    return first_argmax(weights / exponential)


def first_argmax(x: Tensor) -> Tensor:
    """argmax over the last dimension, ties to the lowest index (torch.argmax promises that)."""
    return x.argmax(-1)
