"""The kernels of training-time test's attention compile for an H200, once for all unrolls."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from draftlab.kernels.ttt_attention import ttt_attention
from draftlab.kernels.ttt_attention_types import StepKeyValues
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
    ("dtype", "heads"),
    [
        (torch.bfloat16, (32, 8, 128)),
        (torch.float16, (14, 2, 80)),
        (torch.bfloat16, (8, 4, 256)),
        (torch.float32, (8, 2, 64)),
    ],
    ids=str,
)
def test_compiles(dtype: torch.dtype, heads: tuple[int, int, int], tmp_path: Path) -> None:
    with compiled() as kernels:
        attend(48, 64, 3, heads, dtype)
    assert kernels.keys() == {
        "forward_kernel", "delta_kernel", "d_query_kernel", "d_step_keys_kernel", "d_keys_kernel"
    }  # fmt: skip
    for name, variants in kernels.items():
        (kernel,) = variants
        assert most_shared(variants) <= SHARED, name
        local = spilled(kernel, tmp_path)
        print(f"{name}: {kernel.metadata.shared} bytes shared, {local} bytes spilled")
        if dtype != torch.float32:
            assert local <= SPILLED, name
            if name != "delta_kernel" and heads[2] != 256:
                assert "wgmma.mma_async" in kernel.asm["ptx"], name


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [128, 256])
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
    for name, variants in kernels.items():
        assert len(variants) >= 3, name
        assert len({kernel.hash for kernel in variants}) == 1, name
