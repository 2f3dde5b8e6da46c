"""Keyed noise: randomness as a pure function of (seed, prompt, position, purpose, token).

There is no generator and no state: the same key gives the same number in any slot, batch or order
of arrival (docs/methods.md §5). Different purposes give independent numbers for the same position,
so a draft never shares its noise with the verifier that accepts or rejects it.

Bits come from the finalizer of splitmix64 (Steele, Lea and Flood, OOPSLA 2014).
"""

from __future__ import annotations

import hashlib
from enum import IntEnum

import torch
from torch import Tensor


class Purpose(IntEnum):
    """What a random number is for."""

    EMIT = 1  # the token that the verifier emits at a position: recovered, bonus or undrafted
    ACCEPT = 2  # the acceptance test of the draft at a position
    DRAFT = 3  # the draft token proposed for a position
    FEATURE = 4  # the feature of a position, in training


BLOCK_STRIDE = 256
"""Block verification keys the noise of draft d of a step from position s by
s · BLOCK_STRIDE + d, so that no step reads a number that another one has looked at; larger than
any number of drafts."""

_CACHED_NUMBERS = 1 << 15


def prompt_key(request_id: str) -> int:
    """Return a signed 64-bit key of a request id."""
    return int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:8], "little", signed=True)


def _logical_shift_right(x: Tensor, bits: int) -> Tensor:
    """Return int64 x shifted right, with zeros moved in."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _splitmix64(x: Tensor) -> Tensor:
    """Return the finalizer of splitmix64 of x, a bijection of 64-bit words."""
    x = _logical_shift_right(x, 30).bitwise_xor_(x).mul_(-0x40A7B892E31B1A47)
    x = _logical_shift_right(x, 27).bitwise_xor_(x).mul_(-0x6B2FB644ECCEEE15)
    return _logical_shift_right(x, 31).bitwise_xor_(x)


def keyed_bits(seeds: Tensor, prompts: Tensor, positions: Tensor, purpose: Purpose) -> Tensor:
    """Return 64 well-mixed bits, int64, for broadcastable int64 keys."""
    golden = -0x61C8864680B583EB
    x = _splitmix64(seeds + golden)
    x = _splitmix64(x ^ prompts)
    return _splitmix64(x ^ (positions * 8 + int(purpose) + golden))


def keyed_uniform(seeds: Tensor, prompts: Tensor, positions: Tensor, purpose: Purpose) -> Tensor:
    """Return uniform float64 in [0, 1), one per key."""
    bits = keyed_bits(seeds, prompts, positions, purpose)
    return _logical_shift_right(bits, 11).double() * 2.0**-53


def keyed_exponential(
    seeds: Tensor, prompts: Tensor, positions: Tensor, purpose: Purpose, num_tokens: int
) -> Tensor:
    """Return Exponential(1) float32 [..., num_tokens] for keys [...].

    Small values decide an exponential race, so they carry full relative precision: −log(1 − v),
    with v = (i + ½) · 2⁻³².
    """
    keys = keyed_bits(seeds, prompts, positions, purpose)
    tokens = torch.arange(1, num_tokens + 1, device=keys.device) * -0x61C8864680B583EB
    noise = torch.empty(*keys.shape, num_tokens, device=keys.device)
    # In parts that stay in a CPU's cache, which takes a third of the time.
    size = max(1, _CACHED_NUMBERS // num_tokens)
    parts = zip(
        keys.reshape(-1, 1).split(size), noise.view(-1, num_tokens).split(size), strict=True
    )
    for part, out in parts:
        bits = _logical_shift_right(_splitmix64(part ^ tokens), 32)
        v = bits.double().add_(0.5).mul_(2.0**-32).float()
        torch.log1p(v.clamp_(max=1 - 2.0**-24).neg_(), out=out).neg_()
    return noise


def keyed_spread(keys: Tensor, size: int) -> Tensor:
    """Return uniform float32 [..., size] in [−1, 1) for well-mixed keys [...] (`keyed_bits`)."""
    index = torch.arange(1, size + 1, device=keys.device) * -0x61C8864680B583EB
    return _logical_shift_right(_splitmix64(keys[..., None] ^ index), 40).float() * 2.0**-23 - 1


def exponential_race(weights: Tensor, exponential: Tensor) -> Tensor:
    """Return the index that wins: drawn with probability ∝ weights [..., V] ≥ 0.

    It is the argmin of exponential / weight (the Gumbel-max trick without logarithms). Weights need
    not sum to one. Ties go to the lowest index.
    """
    return (weights / exponential).argmax(-1)
