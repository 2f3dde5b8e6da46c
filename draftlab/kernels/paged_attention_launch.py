"""Launching the kernels of `paged_attention_triton.py`: how a call is cut up, and its workspace."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from draftlab.kernels import dependent_launch
from draftlab.kernels.dependent_launch import launch_options
from draftlab.kernels.paged_attention_triton import attend_kernel, join_kernel, write_kernel

MOST_SPLITS = 16  # more cost more in joining than they save
MOST_AHEAD = 8 << 20  # bytes of weights asked into L2: more of them keep attention waiting
MOST_ROWS_AHEAD = 16  # with more tokens, attention itself needs the memory


class Plan(NamedTuple):
    """How a call is cut up: query rows and keys of a tile, splits of the keys, launch options."""

    rows: int
    keys: int
    splits: int
    warps: int
    stages: int


def plan_attention(
    query: Tensor, key_pool: Tensor, block_table: Tensor, window: int | None, chunk: int | None
) -> Plan:
    """The plan for these shapes: nothing in it depends on what the tensors hold."""
    num_rows, num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key_pool.shape[2]
    group = num_heads // num_kv_heads
    wide = triton.next_power_of_2(head_dim) > 128
    packed = triton.next_power_of_2(num_tokens * group)
    if query.dtype == torch.float32:  # multiplied without tensor cores
        rows, keys, stages = 16, 16, 2
    elif wide:
        rows, keys, stages = min(64, packed), 32, 2
    else:
        # A load waits for its entry of the block table, which takes two of the stages.
        rows, keys, stages = min(128, packed), 64, 5 if packed <= 32 else 3
    rows = max(16, rows, triton.next_power_of_2(group))
    warps = 8 if rows >= 128 else 4

    programs = num_rows * num_kv_heads * triton.cdiv(num_tokens, rows // group)
    span = block_table.shape[1] * key_pool.shape[1]  # the most keys a row can see
    for reach in (window, chunk):
        if reach is not None:
            span = min(span, reach + num_tokens)
    # Enough programs to give every multiprocessor a few; more splits than tiles would be idle.
    splits = 4 * _multiprocessors(query.device) // programs
    splits = max(1, min(splits, triton.cdiv(span, keys), MOST_SPLITS))
    return Plan(rows, keys, 1 << (splits.bit_length() - 1), warps, stages)


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 4
    )


def write_paged_triton(
    key: Tensor, value: Tensor, key_pool: Tensor, value_pool: Tensor, slots: Tensor
) -> None:
    """`write_paged`, on the device."""
    num_rows, num_tokens, num_kv_heads, head_dim = key.shape
    slots = slots.contiguous()
    with torch.cuda.device_of(key):
        write_kernel[num_tokens, num_rows](
            key,
            value,
            key_pool,
            value_pool,
            slots,
            num_tokens,
            *key.stride()[:3],
            *value.stride()[:3],
            *key_pool.stride()[:3],
            *value_pool.stride()[:3],
            BLOCK_SIZE=key_pool.shape[1],
            KV_HEADS=num_kv_heads,
            KV_HEADS_PADDED=triton.next_power_of_2(num_kv_heads),
            HEAD_DIM=head_dim,
            HEAD_DIM_PADDED=triton.next_power_of_2(head_dim),
            **launch_options(key.device),
        )


def attend_paged_triton(
    query: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    block_table: Tensor,
    positions: Tensor,
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    ahead: Tensor | None = None,
    plan: Plan | None = None,
) -> Tensor:
    """`attend_paged`, on the device; `plan` overrides how the call is cut up."""
    num_rows, num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key_pool.shape[2]
    plan = plan or plan_attention(query, key_pool, block_table, window, chunk)
    block_table, positions = block_table.contiguous(), positions.contiguous()
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    partial = statistics = output  # unused without splits
    if plan.splits > 1:
        shape = num_rows, num_tokens, num_heads, plan.splits
        partial = query.new_empty(*shape, head_dim, dtype=torch.float32)
        statistics = query.new_empty(*shape, 2, dtype=torch.float32)
    shared = {
        "HEADS": num_heads,
        "GROUP": num_heads // num_kv_heads,
        "HEAD_DIM": head_dim,
        "HEAD_DIM_PADDED": max(16, triton.next_power_of_2(head_dim)),  # products' least
        "WINDOW": window or 0,
        "CHUNK": chunk or 0,
        "SINKS": sinks is not None,
        "ROWS": plan.rows,
        "KEYS": plan.keys,
        "SPLITS": plan.splits,
        **launch_options(query.device),
    }
    num_tiles = triton.cdiv(num_tokens, plan.rows // shared["GROUP"])
    programs = num_kv_heads * num_tiles * plan.splits * num_rows
    chunks = 0
    few = num_rows * num_tokens <= MOST_ROWS_AHEAD
    if ahead is not None and few and dependent_launch.supported(query.device):
        chunks = min(ahead.numel() * ahead.element_size(), MOST_AHEAD) // 512
    with torch.cuda.device_of(query):
        attend_kernel[num_kv_heads, num_tiles * plan.splits, num_rows](
            query,
            key_pool,
            value_pool,
            block_table,
            positions,
            sinks,
            output,
            partial,
            statistics,
            scale,
            softcap or 0.0,
            ahead if chunks else query,
            chunks,
            num_tokens,
            block_table.shape[1],
            *query.stride()[:3],
            *key_pool.stride()[:3],
            *value_pool.stride()[:3],
            BLOCK_SIZE=key_pool.shape[1],
            SOFTCAP=softcap is not None,
            AHEAD=triton.next_power_of_2(triton.cdiv(chunks, programs)) if chunks else 0,
            PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
            num_warps=plan.warps,
            num_stages=plan.stages,
            **shared,
        )
        if plan.splits > 1:
            join_kernel[num_heads, num_tokens, num_rows](
                positions, sinks, output, partial, statistics, num_tokens, **shared
            )
    return output
