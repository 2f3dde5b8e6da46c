"""The launch of `paged_attention/` on a GPU: its tiling and workspace."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from draftlab.kernels import launching
from draftlab.kernels.launching import launch_options
from draftlab.kernels.paged_attention.plan import check_heads
from draftlab.kernels.paged_attention.triton import attend_kernel, combine_kernel, write_kernel

MAX_SPLITS = 16  # more splits cost more to combine than they save
MAX_PREFETCH = 8 << 20  # bytes prefetched to L2: more of them keep attention waiting
MAX_PREFETCH_TOKENS = 16  # with more tokens, attention itself needs the memory


class Plan(NamedTuple):
    """The tiling of a call: query rows and keys of a tile, splits of the keys, launch options."""

    rows: int
    keys: int
    splits: int
    warps: int
    stages: int


def plan_attention(
    query: Tensor,
    key_pool: Tensor,
    block_table: Tensor,
    window: int | None,
    chunk: int | None,
) -> Plan:
    """Return the plan for these shapes; it does not depend on the tensors' contents."""
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
        # A load waits for its entry of the block table, which occupies two of the stages.
        rows, keys, stages = min(128, packed), 64, 5 if packed <= 32 else 3
    rows = max(16, rows, triton.next_power_of_2(group))
    warps = 8 if rows >= 128 else 4

    programs = num_rows * num_kv_heads * triton.cdiv(num_tokens, rows // group)
    span = block_table.shape[1] * key_pool.shape[1]  # the most keys a row can see
    for limit in (window, chunk):
        if limit is not None:
            span = min(span, limit + num_tokens)
    # Four programs a multiprocessor; more splits than tiles would be idle.
    splits = 4 * _multiprocessors(query.device) // programs
    splits = max(1, min(splits, triton.cdiv(span, keys), MAX_SPLITS))
    return Plan(rows, keys, 1 << (splits.bit_length() - 1), warps, stages)


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    """Return the GPU's number of multiprocessors, and 4 for a CPU."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


def write_paged(key, value, key_pool, value_pool, slots) -> None:
    """Launch `paged_attention.write_paged`."""
    num_rows, num_tokens, num_kv_heads, head_dim = key.shape
    tensors = key, value, key_pool, value_pool
    write_kernel[num_tokens, num_rows](
        *tensors,
        slots.contiguous(),
        num_tokens,
        *(stride for tensor in tensors for stride in tensor.stride()[:3]),
        BLOCK_SIZE=key_pool.shape[1],
        KV_HEADS=num_kv_heads,
        KV_HEADS_PADDED=triton.next_power_of_2(num_kv_heads),
        HEAD_DIM=head_dim,
        HEAD_DIM_PADDED=triton.next_power_of_2(head_dim),
        **launch_options(key.device),
    )


def attend_paged(
    query, key_pool, value_pool, block_table, positions, *, scale, window=None, chunk=None,
    softcap=None, sinks=None, last_seen=None, prefetch_weight=None,
    plan: Plan | None = None,
) -> Tensor:  # fmt: skip
    """Launch `paged_attention.attend_paged`; `plan` replaces the tiling chosen by shape."""
    check_heads(query, key_pool)
    num_rows, num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key_pool.shape[2]
    plan = plan or plan_attention(query, key_pool, block_table, window, chunk)
    block_table, positions = block_table.contiguous(), positions.contiguous()
    last_seen = None if last_seen is None else last_seen.contiguous()
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    partial = statistics = None
    if plan.splits > 1:
        shape = num_rows, num_tokens, num_heads, plan.splits
        partial = query.new_empty(*shape, head_dim, dtype=torch.float32)
        statistics = query.new_empty(*shape, 2, dtype=torch.float32)
    shared = {
        "HEADS": num_heads,
        "GROUP": num_heads // num_kv_heads,
        "HEAD_DIM": head_dim,
        "HEAD_DIM_PADDED": max(16, triton.next_power_of_2(head_dim)),  # the least of a product
        "WINDOW": window or 0,
        "CHUNK": chunk or 0,
        "ROWS": plan.rows,
        "KEYS": plan.keys,
        "SPLITS": plan.splits,
        **launch_options(query.device),
    }
    num_tiles = triton.cdiv(num_tokens, plan.rows // shared["GROUP"])
    programs = num_kv_heads * num_tiles * plan.splits * num_rows
    chunks = 0
    few = num_rows * num_tokens <= MAX_PREFETCH_TOKENS
    if prefetch_weight is not None and few and launching.supported(query.device):
        num_bytes = prefetch_weight.numel() * prefetch_weight.element_size()
        chunks = min(num_bytes, MAX_PREFETCH) // 512
    both = positions, last_seen, sinks, output, partial, statistics
    attend_kernel[num_kv_heads, num_tiles * plan.splits, num_rows](
        query,
        key_pool,
        value_pool,
        block_table,
        *both,
        scale,
        softcap,
        prefetch_weight if chunks else None,
        chunks,
        num_tokens,
        block_table.shape[1],
        *query.stride()[:3],
        *key_pool.stride()[:3],
        *value_pool.stride()[:3],
        BLOCK_SIZE=key_pool.shape[1],
        PREFETCH=triton.next_power_of_2(triton.cdiv(chunks, programs)) if chunks else 0,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=plan.warps,
        num_stages=plan.stages,
        **shared,
    )
    if plan.splits > 1:
        combine_kernel[num_heads, num_tokens, num_rows](*both, num_tokens, **shared)
    return output
