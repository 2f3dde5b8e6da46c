"""Every kernel compiles for an H200, in the dtypes and variants that decoding uses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
from draftlab.kernels.sampling.types import DraftDistribution, SamplingMetadata
from draftlab.target_model.loading import load_target
from draftlab.target_model.settings import TargetSettings
from tests.helpers.decoding import PARALLEL, untrained_head
from tests.helpers.hopper import compiled, most_shared, on_gpu, pretend
from tests.helpers.interpreter import compiles
from tests.helpers.toys import toy_target_folder

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
        on_gpu(rows, dtype=torch.bool),
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
    monkeypatch.setattr(F, "embedding", lambda ids, table: on_gpu(*ids.shape, table.shape[1]))
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
