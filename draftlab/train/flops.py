"""Operations of training, and the speed of the device's matrix products (docs/methods.md §2)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

from draftlab.formatting import rounded_text
from draftlab.heads.config import HeadConfig

SIDE = {"cuda": 8192, "cpu": 1024}
"""Rows of the square matrices whose product is timed."""
TRIES = 7


def dense_flops(config: HeadConfig, num_steps: float, context: float) -> float:
    """Return the floating-point operations of a token if every position runs every step.

    As usual a product counts twice its multiplications, and once more for each of its two gradients
    (fc has one: its input needs none); the teacher's logits are over the whole vocabulary, once a
    position. With Llama-3.1-8B's shapes (draft vocabulary 32,000, 7 steps, rows of
    2,048) this is 17.3e9. What compaction and a stored logsumexp save is not
    subtracted: the number depends on the shapes alone.

    Args:
        num_steps: unrolled steps, or depths.
        context: keys that a position sees on average.
    """
    heads, size = config.num_attention_heads * config.head_dim, config.hidden_size
    qkv = heads + 2 * config.num_key_value_heads * config.head_dim
    inputs = (config.num_layers + 1) * size  # the first layer also reads the embedding
    others = heads * size + 3 * size * config.intermediate_size
    layers = inputs * qkv + config.num_layers * others
    attention = 2 * config.num_layers * heads * context
    step = layers + attention + size * config.draft_vocab_size
    fused = config.feature_size * size
    teacher = config.target_hidden_size * config.vocab_size
    return 2.0 * (3 * num_steps * step + 2 * fused + teacher)


def block_flops(config: HeadConfig, num_steps: float, context: float) -> float:
    """Return the floating-point operations of a token of a block head (see `dense_flops`).

    Keys and values of the context are computed once a position, all else once a slot. The weights
    of lm_head are frozen, so it has a gradient for its input alone.

    Args:
        num_steps: slots of a position on average.
    """
    heads, size = config.num_attention_heads * config.head_dim, config.hidden_size
    keys_values = 2 * config.num_key_value_heads * config.head_dim
    layer = size * (2 * heads + keys_values + 3 * config.intermediate_size)
    layers = config.num_layers * (layer + 2 * heads * context)
    position = config.feature_size * size + config.num_layers * size * keys_values
    rank = config.options().get("markov_rank", 0)
    logits = config.draft_vocab_size * (2 * size + 3 * rank)
    teacher = config.target_hidden_size * config.vocab_size
    return 2.0 * (num_steps * (3 * layers + logits) + 3 * position + teacher)


def kept_bytes(config: HeadConfig, dtype: torch.dtype) -> int:
    """Return about how many bytes the backward pass needs of a row of one step.

    These are inputs of products, queries, keys and values, the output of attention, gate and up.
    """
    heads, size = config.num_attention_heads * config.head_dim, config.hidden_size
    keys_values = 2 * config.num_key_value_heads * config.head_dim
    kept = 6 * size + 3 * heads + 2 * keys_values + 2 * config.intermediate_size
    return config.num_layers * kept * dtype.itemsize


def mean_context(lengths: Sequence[int] | np.ndarray) -> float:
    """Return the mean number of keys that a position sees in conversations of these lengths."""
    keys = np.asarray(lengths, np.float64)
    return float((keys * (keys + 1) / 2).sum() / keys.sum())


@lru_cache
def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the floating-point operations a second of a large product of square matrices."""
    side = SIDE.get(device.type, SIDE["cpu"])
    generator = torch.Generator(device).manual_seed(0)
    factor = torch.randn(side, side, device=device, generator=generator).to(dtype)
    seconds = []
    for _ in range(TRIES):
        start = _now(device)
        factor @ factor
        seconds.append(_now(device) - start)
    return 2 * side**3 / min(seconds)


def measure_mfu(
    flops: float, device: torch.device, dtype: torch.dtype, num_gpus: int
) -> tuple[float, str]:
    """Return the MFU at one token a second on all GPUs that have work, and a line about it.

    Args:
        flops: of a token, by the objective's formula.
        num_gpus: GPUs that have work.
    """
    rate = matrix_rate(device, dtype)
    return flops / (rate * num_gpus), (
        f"MFU: {rounded_text(flops / 1e9)} GFLOP a token, as if every step ran every position (the "
        f"rows that are skipped may raise it above 100 %), over {rounded_text(rate / 1e12)} "
        f"TFLOP/s of a large product on each of the GPUs that have work ({num_gpus})"
    )


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
