"""Operations of training, and the speed of the device's matrix products (docs/methods.md §2)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from draftlab.heads.config import HeadConfig
from draftlab.heads.head import DecoderLayer, DraftHead

SIDE = {"cuda": 8192, "cpu": 1024}
"""Rows of the square matrices whose product is timed."""
TRIES = 7


@dataclass(frozen=True)
class StepWork:
    """The sizes that a training step's operations are counted from.

    Attributes:
        positions: positions that are not padding.
        rows: rows of each step or depth (N_k).
        teachers: positions at which the target's logits are computed.
        context: keys that a position sees on average.
    """

    positions: float
    rows: Sequence[float]
    teachers: float
    context: float


def chain_flops(head: DraftHead, work: StepWork) -> float:
    """Return the floating-point operations of training a chain.

    A product counts twice its multiplications, and once more for each of its two gradients, if they
    are needed: the features need none, and frozen weights have none. Only rows that run are
    counted: step 0 at every position, its queries in the last layer and later steps at rows with
    loss. What is computed a second time (for acceptance weighting, lk) is not.
    """
    first, later = work.rows[0], sum(work.rows[1:])
    total = 2.0 * head.fc.weight.numel() * work.positions
    if head.fc_in_every_pass:
        total += 3.0 * head.fc.weight.numel() * later
    for layer in head.layers:
        queried = later + (first if layer is head.layers[-1] else work.positions)
        total += 3 * _key_value(layer) * (work.positions + later)
        others = layer.multiplications() - _key_value(layer) + _attention(layer, work)
        total += 3 * others * queried
    return 2 * (total + _logits(head, work))


def parallel_flops(head: DraftHead, work: StepWork) -> float:
    """Return the floating-point operations of training a parallel head (see `chain_flops`).

    All masked slots enter the first layer as one vector, whose products are computed once.
    """
    first, masked = work.rows[0], sum(work.rows[1:])
    total = 2.0 * head.fc.weight.numel() * work.positions
    for number, layer in enumerate(head.layers):
        queried = first if layer is head.layers[-1] else work.positions
        attention = layer.self_attn
        inputs = _key_value(layer) + attention.q_proj.weight.numel()
        total += 3 * _key_value(layer) * work.positions
        total += 3 * (layer.multiplications() - _key_value(layer)) * queried
        total += 3 * (layer.multiplications() - (0 if number else inputs)) * masked
        total += 3 * _attention(layer, work) * (queried + masked)
    return 2 * (total + _logits(head, work))


def block_flops(head: DraftHead, work: StepWork) -> float:
    """Return the floating-point operations of training a block head (see `chain_flops`).

    Keys and values of the context are computed at every position, all else at every slot of the
    anchors, which are the rows of the first step.
    """
    slots = work.rows[0] * head.config.block_size
    total = 2.0 * head.fc.weight.numel() * work.positions
    for layer in head.layers:
        total += 3 * _key_value(layer) * work.positions
        total += 3 * (layer.multiplications() + _attention(layer, work)) * slots
    return 2 * (total + _logits(head, work))


def selector_flops(head: DraftHead, work: StepWork) -> float:
    """Return the floating-point operations of training a block head with a candidate selector.

    A further product of lm_head finds the candidates. Their own products are few.
    """
    projection = head.candidate_selector.hidden_projection.weight.numel()
    found = head.lm_head.weight.numel() + 3 * projection
    return block_flops(head, work) + 2 * sum(work.rows) * found


def _key_value(layer: DecoderLayer) -> int:
    return layer.self_attn.key_value_multiplications()


def _attention(layer: DecoderLayer, work: StepWork) -> float:
    """Return the multiplications of a row's scores and of its sum of values."""
    context = work.context if layer.window is None else min(work.context, layer.window)
    return 2 * layer.self_attn.num_heads * layer.self_attn.head_dim * context


def _logits(head: DraftHead, work: StepWork) -> float:
    """Return the multiplications of the logits of all rows, and of the target's."""
    tables = sum(
        (3 if module.weight.requires_grad else 2) * module.weight.numel()
        for module in head.draft_tables()
    )
    teacher = head.config.target_hidden_size * head.config.draft_vocab_size  # Z is stored
    return sum(work.rows) * tables + work.teachers * teacher


def kept_bytes(config: HeadConfig, dtype: torch.dtype) -> int:
    """Return about how many bytes the backward pass needs of a row of one step.

    It needs inputs of products, queries, keys, values, attention's output, gate and up.
    """
    heads, size = config.num_attention_heads * config.head_dim, config.hidden_size
    keys_values = 2 * config.num_key_value_heads * config.head_dim
    kept = 6 * size + 3 * heads + 2 * keys_values + config.kept_by_feed_forward
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


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
