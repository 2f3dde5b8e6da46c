"""The launch of `ttt_attention/` and `parallel_attention/` on a GPU: tiling and autograd."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from draftlab.kernels.launching import FP_FUSION, cdiv, next_power_of_2
from draftlab.kernels.parallel_attention import ParallelRows
from draftlab.kernels.ttt_attention import check_inputs
from draftlab.kernels.ttt_attention.triton import (
    LOG2_E,
    d_keys_kernel,
    d_query_kernel,
    d_slot_keys_kernel,
    d_step_keys_kernel,
    delta_kernel,
    forward_kernel,
)

STEPS_AT_ONCE = 8  # a kernel is compiled for up to 8 steps, up to 16, 24, …
SCAN = 1024  # rows scanned together
DELTA_ROWS = 32
SLOT_ELEMENTS = 4096  # of a program's tile of masked slots, slots × channels


class Tiles(NamedTuple):
    """The tiling of a kernel: packed rows and keys of a tile, and launch options."""

    rows: int
    keys: int
    warps: int
    stages: int


class Plan(NamedTuple):
    """The tiling of the forward kernel, of dQ, and of dK and dV of step keys and step-0 keys."""

    forward: Tiles
    d_query: Tiles
    d_step_keys: Tiles
    d_keys: Tiles


@cache
def plan_ttt_attention(dtype: torch.dtype, head_dim: int, group: int) -> Plan:
    """Return the plan for these shapes; `group` query heads share a kv head."""
    if dtype == torch.float32:  # multiplied without tensor cores
        plan = Plan(*[Tiles(16, 16, 4, 1)] * 4)
    elif next_power_of_2(head_dim) > 128:
        plan = Plan(
            Tiles(128, 32, 8, 2), Tiles(64, 32, 8, 2), Tiles(32, 32, 8, 2), Tiles(32, 64, 8, 2)
        )
    else:
        plan = Plan(
            Tiles(64, 64, 4, 3), Tiles(64, 32, 4, 3), Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 2)
        )
    least = next_power_of_2(group)
    return Plan(*(tiles._replace(rows=max(tiles.rows, least)) for tiles in plan))


def ttt_attention(query, key, value, index, starts, steps=None, *, plan: Plan | None = None):
    """Launch `ttt_attention.ttt_attention`; `plan` replaces the chosen tiling."""
    rows, tensors = (None, ()) if steps is None else (steps.rows, (*steps.keys, *steps.values))
    check_inputs(query, key, value, *tensors)
    return _TttAttention.apply(query, key, value, index, starts, plan, None, rows, *tensors)


def parallel_attention(query, key, value, slot_key, slot_value, rows, *, plan: Plan | None = None):
    """Launch `parallel_attention.parallel_attention`; `plan` replaces the chosen tiling."""
    check_inputs(query, key, value, slot_key, slot_value)
    return _TttAttention.apply(
        query, key, value, rows.index, rows.starts, plan, rows, rows.slots, slot_key, slot_value
    )


class _TttAttention(torch.autograd.Function):
    """The autograd function; it saves its inputs, the output, and log2 Σ 2^score of each row.

    `parallel` has the rows of parallel drafting, whose keys are one tensor for all steps. It is
    None for training-time test, which has a tensor for each step.
    """

    @staticmethod
    def forward(
        ctx: Any, query, key, value, index, starts, plan, parallel, step_rows, *step_kv
    ) -> Tensor:
        query, key, value = (
            t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value)
        )
        index, starts = index.contiguous(), starts.contiguous()
        step_kv = tuple(t.contiguous() for t in step_kv)
        step_rows = index if step_rows is None else step_rows.contiguous()
        group = query.shape[2] // key.shape[2]
        plan = plan or plan_ttt_attention(query.dtype, query.shape[-1], group)
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        lse = query.new_empty(query.shape[:3], dtype=torch.float32)
        segments = None if parallel is None else parallel.segments
        ctx.save_for_backward(
            query, key, value, index, starts, segments, step_rows, output, lse, *step_kv
        )
        ctx.plan, ctx.parallel = plan, parallel
        if output.numel():
            tiles, steps = plan.forward, len(step_kv) // 2
            keys, values = (
                _pad_steps(t, query, parallel) for t in (step_kv[:steps], step_kv[steps:])
            )
            forward_kernel[_row_tiles(query, key, tiles, parallel)](
                query, key, value, keys, values, step_rows, index, starts, segments, output, lse,
                query.shape[-1] ** -0.5 * LOG2_E.value, query.shape[1], steps,
                _num_segments(parallel), *_strides(query, key, value), STEPS=len(keys),
                **_shapes(query.shape[2], *key.shape[2:]), **_options(tiles, query),
            )  # fmt: skip
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, index, starts, segments, step_rows, output, lse, *step_kv = (
            ctx.saved_tensors
        )
        plan, parallel, steps = ctx.plan, ctx.parallel, len(step_kv) // 2
        d_output = d_output.contiguous()
        d_query, d_key, d_value = (
            torch.empty_like(t, memory_format=torch.contiguous_format) for t in (query, key, value)
        )
        if parallel is None:
            # Zeros for rows that ended in earlier steps; the newest step's rows are all here.
            sizes = [t.numel() for t in step_kv]
            zeros = query.new_zeros(sum(sizes)).split(sizes)
            d_step_kv = tuple(z.view_as(t) for z, t in zip(zeros, step_kv, strict=True))
        else:
            d_step_kv = tuple(torch.empty_like(t) for t in step_kv)
        scale = query.shape[-1] ** -0.5
        scales = scale, scale * LOG2_E.value
        num_rows, strides = query.shape[1], _strides(query, key, value)
        shapes, dims = _shapes(query.shape[2], *key.shape[2:]), _head_dims(query.shape[-1])
        with torch.cuda.device_of(query):
            delta = torch.empty_like(lse)
            if output.numel():
                packed = delta.numel()
                delta_kernel[(cdiv(packed, DELTA_ROWS),)](
                    output, d_output, delta, packed, ROWS=DELTA_ROWS, **dims, **FP_FUSION
                )
                each = (step_kv[:steps], step_kv[steps:], d_step_kv[:steps], d_step_kv[steps:])
                keys, values, *d_keys_values = (_pad_steps(t, query, parallel) for t in each)
                d_query_kernel[_row_tiles(query, key, plan.d_query, parallel)](
                    query, key, value, keys, values, step_rows, index, starts, segments, d_output,
                    lse, delta, d_query, *scales, num_rows, steps, _num_segments(parallel),
                    *strides, STEPS=len(keys), **shapes, **_options(plan.d_query, query),
                )  # fmt: skip
                if steps and parallel is None:
                    d_step_keys_kernel[_row_tiles(query, key, plan.d_step_keys)](
                        query, keys, values, step_rows, index, starts, d_output, lse, delta,
                        *d_keys_values, *scales, num_rows, steps, *strides[:3],
                        STEPS=len(keys), **shapes, **_options(plan.d_step_keys, query),
                    )  # fmt: skip
            if key.numel():
                num_tiles = cdiv(key.shape[1], plan.d_keys.keys)
                d_keys_kernel[key.shape[2], key.shape[0], num_tiles](
                    query, key, value, index, starts, segments, d_output, lse, delta, d_key,
                    d_value, *scales, num_rows, key.shape[1], _num_segments(parallel), *strides,
                    SCAN=SCAN, **shapes, **_options(plan.d_keys, query),
                )  # fmt: skip
            if parallel is not None and step_kv[0].numel():
                num_slots, at_once = len(step_kv[0]), SLOT_ELEMENTS // dims["HEAD_DIM_PADDED"]
                d_slot_keys_kernel[key.shape[2], cdiv(num_slots, at_once)](
                    query, *step_kv, parallel.readers.contiguous(), d_output, lse, delta,
                    *d_step_kv, *scales, num_rows, num_slots, len(parallel.readers), *strides[:3],
                    SLOTS=at_once, **shapes, **FP_FUSION,
                )  # fmt: skip
        return d_query, d_key, d_value, *[None] * 5, *d_step_kv


def _num_segments(parallel: ParallelRows | None) -> int:
    return 1 if parallel is None else len(parallel.sizes)


def _pad_steps(
    tensors: Sequence[Tensor], filler: Tensor, parallel: ParallelRows | None
) -> tuple[Tensor, ...]:
    """Pad with a tensor that is not read, so that unrolls of all lengths run one kernel."""
    count = 1 if parallel else max(1, cdiv(len(tensors), STEPS_AT_ONCE)) * STEPS_AT_ONCE
    return (*tensors, *[filler] * (count - len(tensors)))


def _row_tiles(
    query: Tensor, key: Tensor, tiles: Tiles, parallel: ParallelRows | None = None
) -> tuple[int, int, int]:
    """Return the grid of a kernel whose programs take one tile of rows each."""
    num_batch, num_rows, num_heads, _ = query.shape
    tokens = tiles.rows // next_power_of_2(num_heads // key.shape[2])
    sizes = (num_rows,) if parallel is None else parallel.sizes
    return key.shape[2], num_batch, sum(cdiv(size, tokens) for size in sizes)


def _strides(*tensors: Tensor) -> list[int]:
    """Return the first three strides of each tensor."""
    return [stride for tensor in tensors for stride in tensor.stride()[:3]]


@cache
def _shapes(num_heads: int, num_kv_heads: int, head_dim: int) -> dict[str, int]:
    """Return the kernels' constants of the heads."""
    group = num_heads // num_kv_heads
    heads = {"GROUP": group, "GROUP_PADDED": next_power_of_2(group)}
    return {"KV_HEADS": num_kv_heads, **heads, **_head_dims(head_dim)}


@cache
def _head_dims(head_dim: int) -> dict[str, int]:
    """Return the kernels' constants of the head dimension."""
    return {"HEAD_DIM": head_dim, "HEAD_DIM_PADDED": max(16, next_power_of_2(head_dim))}


def _options(tiles: Tiles, query: Tensor) -> dict[str, Any]:
    """Return a launch's tile sizes and options."""
    return {
        "ROWS": tiles.rows,
        "KEYS": tiles.keys,
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    } | FP_FUSION
