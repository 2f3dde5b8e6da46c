"""Every kernel compiles for an H200, in the dtypes and variants that decoding and training use."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from draftlab.kernels.parallel_attention import ParallelRows, parallel_attention
from draftlab.kernels.sampling.types import DraftDistribution, SamplingMetadata
from draftlab.kernels.ttt_attention import StepKeyValues, ttt_attention
from draftlab.target_model.loading import load_target
from draftlab.target_model.settings import TargetSettings
from draftlab.train.objectives.block import MOST_QUERIES
from tests.helpers.decoding import PARALLEL, untrained_head
from tests.helpers.hopper import compiled, most_shared, on_gpu, pretend
from tests.helpers.interpreter import compiles
from tests.helpers.toys import toy_target_folder

pytest.importorskip("triton")
pytestmark = compiles
SHARED = 227 * 1024  # bytes that a program may have on Hopper
INT = {"dtype": torch.int64}


@pytest.fixture
def kernels() -> Iterator[dict[str, list[Any]]]:
    with compiled() as launched:
        yield launched
    for name, variants in launched.items():
        assert all(len(kernel.asm["cubin"]) > 0 for kernel in variants), name
        assert most_shared(variants) <= SHARED, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_rows", [1, 9, 32])
def test_products(kernels: dict[str, list[Any]], num_rows: int, dtype: torch.dtype) -> None:
    from draftlab.kernels.linear import linear, linear_then_norm, swiglu_linear

    x, bias = on_gpu(num_rows, 4096, dtype=dtype), on_gpu(6144, dtype=dtype)
    norm, qkv = on_gpu(4096, dtype=dtype), on_gpu(6144, 4096, dtype=dtype)
    linear(x, qkv, norm_weight=norm, eps=1e-5, bias=bias)
    y, normed = linear_then_norm(x, on_gpu(4096, 4096, dtype=dtype), norm, 1e-5, residual=x)
    gate = on_gpu(14336, 4096, dtype=dtype)
    inner = swiglu_linear(normed, gate, gate)
    linear_then_norm(inner, on_gpu(4096, 14336, dtype=dtype), norm, 1e-5, residual=y)
    linear(normed, qkv)
    variants = kernels["skinny_kernel"]
    assert len(variants) == 5
    assert all("griddepcontrol.wait" in kernel.asm["ptx"] for kernel in variants)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("window", "softcap", "sinks"), [(None, None, False), (128, 30.0, True)])
def test_attention(
    kernels: dict[str, list[Any]],
    dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
    sinks: bool,
) -> None:
    from draftlab.kernels.paged_attention import attend_paged, write_paged

    pool = on_gpu(40, 64, 8, 128, dtype=dtype)
    new = on_gpu(1, 5, 8, 128, dtype=dtype)
    write_paged(new, new, pool, pool, on_gpu(1, 5, **INT))
    weights = on_gpu(4096, 4096)
    for num_rows in (1, 40):  # with splits of the keys and without
        attend_paged(
            on_gpu(num_rows, 5, 32, 128, dtype=dtype),
            pool,
            pool,
            on_gpu(num_rows, 32, dtype=torch.int32),
            on_gpu(num_rows, 5, **INT),
            scale=0.1,
            window=window,
            softcap=softcap,
            sinks=on_gpu(32, dtype=dtype) if sinks else None,
            prefetch_weight=weights,
        )
    assert {"write_kernel", "attend_kernel", "combine_kernel"} <= kernels.keys()
    one_row = kernels["attend_kernel"][0]
    assert "cp.async.bulk.prefetch.L2" in one_row.asm["ptx"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_added_rows(kernels: dict[str, list[Any]], dtype: torch.dtype) -> None:
    from draftlab.kernels.add_rows import add_rows_

    whole, index = on_gpu(9, 6144, dtype=dtype), on_gpu(5, **INT)
    add_rows_(whole[:, :4096], index, on_gpu(5, 4096, dtype=dtype))
    add_rows_(whole[:, 4096:], index, on_gpu(5, 2048, dtype=dtype))
    assert kernels.keys() == {"add_rows_kernel"}


def test_rows_in_8_bits(kernels: dict[str, list[Any]]) -> None:
    from draftlab.kernels.fp8_rows import quantise_rows

    quantise_rows(on_gpu(5, 32_000, dtype=torch.bfloat16))
    (kernel,) = kernels["quantise_rows_kernel"]
    assert "ld.global.v4.b32" in kernel.asm["ptx"]
    assert "satfinite.e4m3x2" in kernel.asm["ptx"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gates(kernels: dict[str, list[Any]], dtype: torch.dtype) -> None:
    from draftlab.kernels.swiglu import swiglu, swiglu_backward_

    gate_up = on_gpu(5, 2 * 14336, dtype=dtype)
    swiglu_backward_(gate_up, swiglu(gate_up))
    assert kernels.keys() == {"swiglu_kernel", "swiglu_backward_kernel"}
    # 16 bytes a load, where rows are whole: a step reads and writes 7 GB of these.
    assert all("ld.global.v4.b32" in k.asm["ptx"] for (k,) in kernels.values())


@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_verification(kernels: dict[str, list[Any]], dtype: torch.dtype, drawn: bool) -> None:
    from draftlab.kernels.verify import verify

    rows, k, vocab, drafted = 3, 4, 128_256, 32_000
    keys = sampling_metadata(rows)
    q = DraftDistribution(
        on_gpu(rows, k, drafted, dtype=dtype),
        on_gpu(rows, k, dtype=torch.float32),
        keys.temperature,
        on_gpu(drafted, **INT),
        on_gpu(vocab, dtype=torch.int32),
    )
    drafts, ints = on_gpu(rows, k, **INT), on_gpu(rows, **INT)
    logits = on_gpu(rows, k + 1, vocab, dtype=dtype)
    verify(logits, drafts, ints, q if drawn else None, ints, keys, limited=False)
    assert kernels.keys() == {"reduce_logits", "reject_and_resample", "finalize"}


@pytest.mark.parametrize("draft_probs", [False, True])
@pytest.mark.parametrize("kind", ["chain", "parallel", "chain with confidence"])
def test_a_whole_step(
    kernels: dict[str, list[Any]],
    kind: str,
    draft_probs: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Target of four layers and head in bfloat16: what a captured step launches.

    Nothing but these kernels and the few torch operations between them may be in a step.
    """
    from draftlab.engine.drafter import new_drafter
    from draftlab.engine.head_pass import FusedHead
    from draftlab.engine.step import InputBatch, Step
    from draftlab.target_model.fused_decoder import FusedDecoder

    folder = toy_target_folder(tmp_path, layers=4)
    target = load_target(TargetSettings(path=str(folder), device="cpu", dtype="bfloat16"))
    stated = kind == "chain with confidence"
    family = PARALLEL | {"qk_norm": True} if kind == "parallel" else {}
    head = untrained_head(target, 3, 200, **family).to(torch.bfloat16).eval()
    drafter = new_drafter(head, 3, draft_probs=draft_probs, confidence=stated)
    slots = InputBatch(2, 3, 4, target.device, draft_vocab=drafter.draft_vocab, confidence=stated)
    step = Step(target, target.new_paged_cache(9, 16), slots, drafter, max_length=64)
    step.decoder = FusedDecoder(target)
    drafter.start(9, 16)
    drafter.runner = FusedHead(head)
    for owner in (slots, slots.keys, drafter):
        pretend(owner)
    # Tokens are not computed, so they are none that have an embedding.
    monkeypatch.setattr(F, "embedding", lambda ids, table, *_: on_gpu(*ids.shape, table.shape[1]))
    step(on_gpu(2, **INT), limited=False)
    launched = {name: len(variants) for name, variants in kernels.items()}
    # Target layers, and the head's: three passes over one, or one pass over two.
    passes, layers, rows = (1, 2, 3) if kind == "parallel" else (3, 3, 1)
    assert launched["attend_kernel"] == 4 + layers
    assert launched["skinny_kernel"] == 4 * 4 + 1 + 1 + 4 * layers + passes  # …, lm_head, fc, head
    assert launched["rope_write_kernel"] == launched["attend_kernel"]
    assert launched["head_inputs_kernel"] == passes
    assert launched["last_rows_kernel"] == rows
    assert (
        launched["reduce_blocks"]
        == launched["sample_blocks"]
        == (3 if draft_probs or kind != "parallel" else 1)
    )
    lay_out = "layout_kernel" if kind == "parallel" else "chain_layout_kernel"
    once = {"gather_batch_kernel", "angles_kernel", "reduce_logits", "reject_and_resample"}
    assert once | {"finalize", "commit_kernel", lay_out, "store_drafts_kernel"} <= launched.keys()


def sampling_metadata(rows: int) -> SamplingMetadata:
    reals, ints = on_gpu(rows, dtype=torch.float32), on_gpu(rows, **INT)
    return SamplingMetadata(*({"temperature": reals, "top_p": reals}.get(f, ints) for f in FIELDS))


FIELDS = tuple(SamplingMetadata.__dataclass_fields__)

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
