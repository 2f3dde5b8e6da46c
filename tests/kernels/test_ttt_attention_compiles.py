"""The kernels of training attention compile for an H200, once for all unrolls and depths."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from draftlab.kernels.parallel_attention import ParallelRows, parallel_attention
from draftlab.kernels.ttt_attention import StepKeyValues, ttt_attention
from draftlab.train.objectives.block import MOST_QUERIES
from tests.helpers.hopper import compiled, most_shared, on_gpu
from tests.helpers.interpreter import compiles

pytestmark = compiles
SHARED = 227 * 1024  # bytes that a program may have on Hopper
SPILLED = 512  # bytes a thread may keep in local memory instead of registers


def attend(num_rows: int, num_keys: int, steps: int, heads: tuple[int, int, int], dtype) -> None:
    """Forward and backward of one row of a batch."""
    num_heads, num_kv_heads, head_dim = heads
    query, key, value = (
        on_gpu(1, *shape, head_dim, dtype=dtype).requires_grad_()
        for shape in ((num_rows, num_heads), (num_keys, num_kv_heads), (num_keys, num_kv_heads))
    )
    index = on_gpu(1, num_rows, dtype=torch.int64)
    step_keys = None
    for _ in range(steps):
        new = (
            on_gpu(1, num_rows, num_kv_heads, head_dim, dtype=dtype).requires_grad_()
            for _ in range(2)
        )
        step_keys = StepKeyValues.extend(step_keys, *new, index)
    ttt_attention(query, key, value, index, index, step_keys).sum().backward()


def attend_in_parallel(
    sizes: tuple[int, ...], num_keys: int, heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """Run forward and backward of one row of a batch, which has `sizes` rows of each depth."""
    num_heads, num_kv_heads, head_dim = heads
    num_rows, num_slots = sum(sizes), sum(sizes[1:])
    shapes = (
        (1, num_rows, num_heads),
        *[(1, num_keys, num_kv_heads)] * 2,
        *[(num_slots, num_kv_heads)] * 2,
    )
    leaves = [on_gpu(*shape, head_dim, dtype=dtype).requires_grad_() for shape in shapes]
    index, slots = (
        on_gpu(*shape, num_rows, dtype=torch.int64) for shape in ((1,), (len(sizes) - 1, 1))
    )
    readers = on_gpu(len(sizes) - 1, num_slots, dtype=torch.int64)
    segments = on_gpu(len(sizes) + 1, dtype=torch.int64)
    rows = ParallelRows(sizes, index, index, slots, readers, segments)
    parallel_attention(*leaves, rows).sum().backward()


def spilled(kernel: Any, folder: Path) -> int:
    """Bytes of local memory of a thread."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        pytest.skip("this Triton has no cuobjdump")
    usage = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True).stdout
    return int(re.search(r"STACK:(\d+)", usage)[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "heads", "parallel"),
    [
        (torch.bfloat16, (32, 8, 128), False),
        (torch.float16, (14, 2, 80), True),
        (torch.bfloat16, (8, 4, 256), True),
        (torch.float32, (8, 2, 64), False),
    ],
    ids=str,
)
def test_compiles(
    dtype: torch.dtype, heads: tuple[int, int, int], parallel: bool, tmp_path: Path
) -> None:
    with compiled() as kernels:
        if parallel:
            attend_in_parallel((24, 16, 8), 64, heads, dtype)
        else:
            attend(48, 64, 3, heads, dtype)
    own = "d_slot_keys_kernel" if parallel else "d_step_keys_kernel"
    assert kernels.keys() == {
        "forward_kernel", "delta_kernel", "d_query_kernel", own, "d_keys_kernel"
    }  # fmt: skip
    for name, variants in kernels.items():
        (kernel,) = variants
        assert most_shared(variants) <= SHARED, name
        local = spilled(kernel, tmp_path)
        print(f"{name}: {kernel.metadata.shared} bytes shared, {local} bytes spilled")
        if dtype != torch.float32:
            assert local <= SPILLED, name
            if name not in ("delta_kernel", "d_slot_keys_kernel") and heads[2] != 256:
                assert "wgmma.mma_async" in kernel.asm["ptx"], name


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [256])
def test_the_largest_group_of_a_block_compiles(head_dim: int) -> None:
    with compiled() as kernels:
        attend(48, 64, 8, (MOST_QUERIES, 1, head_dim), torch.bfloat16)
    for name, variants in kernels.items():
        assert most_shared(variants) <= SHARED, name


def test_one_variant_for_all_unrolls() -> None:
    """Numbers of rows, keys and steps change with every batch, and must not start the compiler."""
    heads = 2, 1, 16
    with compiled() as kernels:
        for shape in ((48, 64, 0), (1, 1, 1), (17, 16, 6), (5, 33, 8)):
            attend(*shape, heads, torch.float16)
    check_one_variant(kernels)


def test_one_variant_for_all_depths() -> None:
    with compiled() as kernels:
        for sizes, num_keys in (((48, 5), 64), ((1, 1), 1), ((17, 16, 16, 3, 1), 16)):
            attend_in_parallel(sizes, num_keys, (2, 1, 16), torch.float16)
    check_one_variant(kernels)


def check_one_variant(kernels: dict[str, list[Any]]) -> None:
    """Check that calls of different shapes compiled equal kernels."""
    for name, variants in kernels.items():
        assert len(variants) >= 3, name
        assert len({kernel.hash for kernel in variants}) == 1, name
