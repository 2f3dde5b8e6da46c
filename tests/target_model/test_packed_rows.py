"""Packed conversations have the states that they have alone; targets that mix them are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from draftlab.target_model import attention, check_capabilities, packed_rows
from draftlab.target_model.model import Target
from draftlab.target_model.packed_rows import PackedRow
from tests.helpers.hybrid_zoo import HYBRID
from tests.helpers.zoo import (
    WITHOUT_PAGES,
    ZOO,
    assert_close,
    change_layer,
    random_texts,
    zoo_target,
)

BOUNDARIES = (0, 2, 3)


def texts() -> list[Tensor]:
    return random_texts((70, 3, 33), seed=3)


def run_packed(target: Target, rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return features and last states [T, …] of packed texts."""
    packed_row = PackedRow.of([len(row) for row in rows], target.device)
    states = target.states(torch.cat(rows)[None], BOUNDARIES, packed_row=packed_row)
    return states.features[0], states.last[0]


def run_alone(target: Target, rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the same, with a pass for each text."""
    passes = [target.states(row[None], BOUNDARIES) for row in rows]
    return torch.cat([p.features[0] for p in passes]), torch.cat([p.last[0] for p in passes])


def assert_packing_is_exact(target: Target, rows: list[Tensor]) -> None:
    for actual, expected in zip(run_packed(target, rows), run_alone(target, rows), strict=True):
        assert_close(actual, expected)


@pytest.mark.parametrize("kind", [*ZOO, *HYBRID])
def test_packed_states_are_those_alone(kind: str, tmp_path: Path) -> None:
    """The texts cross borders of windows, chunks and temperatures (every 16 positions at most)."""
    target = zoo_target(tmp_path, kind)
    assert target.padding_reason is None
    assert_packing_is_exact(target, [*texts(), torch.tensor([7])])


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss"])
def test_scores_without_a_kernel_are_computed_in_parts(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, rows = zoo_target(tmp_path, kind), texts()
    whole = run_packed(target, rows)
    sizes: list[int] = []
    masked_fill = Tensor.masked_fill
    monkeypatch.setattr(attention, "MOST_SCORES", 3000)
    monkeypatch.setattr(
        Tensor, "masked_fill", lambda x, *rest: sizes.append(x.numel()) or masked_fill(x, *rest)
    )
    for actual, expected in zip(run_packed(target, rows), whole, strict=True):
        assert_close(actual, expected)
    assert max(sizes) <= 3000


def varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    begins: Tensor,
    begins_k: Tensor,
    longest: int,
    longest_k: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool = False,
) -> Tensor:
    """The documented behaviour of torch's kernel in eager operations: [T, heads, head_dim]."""
    assert begins is begins_k
    assert (begins.dtype, longest, window_size[1]) == (torch.int32, longest_k, 0)
    assert longest == int(begins.diff().max())
    assert enable_gqa or "enable_gqa" not in packed_rows._OPTIONS
    group, left = query.shape[1] // key.shape[1], window_size[0]
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    column = torch.arange(len(query))
    number = torch.bucketize(column, begins[1:], right=True)
    distance = column[:, None] - column
    mask = (number[:, None] == number) & (distance >= 0) & ((distance <= left) | (left < 0))
    scores = torch.einsum("qhd,khd->hqk", query, key) * (scale or query.shape[-1] ** -0.5)
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value)


@pytest.mark.parametrize("kind", ["llama", "mistral", "granite", "llama4_text", "cohere2"])
def test_the_varlen_kernel_is_called_correctly(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grouped heads, windows, chunks and a scale of the model's own."""
    target = zoo_target(tmp_path, kind)
    calls = []

    def counted(*args: Any, **options: Any) -> Tensor:
        calls.append(options)
        return varlen(*args, **options)

    monkeypatch.setattr(packed_rows, "varlen_attn", counted)
    monkeypatch.setattr(attention, "supports_varlen", lambda *_: True)
    assert_packing_is_exact(target, texts())
    assert len(calls) == target.num_layers


@pytest.mark.parametrize("kind", ["llama", "llama4_text", "gpt_oss"])
def test_a_gpu_pads_rows_without_the_varlen_kernel(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A small kernel for every conversation and layer took five times as long as padding."""
    target = zoo_target(tmp_path, kind)
    experiment = "one by one", check_capabilities._in_one_kernel, 0.0
    assert "no kernel for torch.float32 heads of" in check_capabilities.find_fault(
        target, *experiment
    )
    monkeypatch.setattr(packed_rows, "varlen_attn", varlen)
    monkeypatch.setattr(attention, "supports_varlen", lambda *_: True)
    fault = check_capabilities.find_fault(target, *experiment)
    if kind == "gpt_oss":
        assert fault is not None
        assert fault.endswith("with sinks or capped scores")
    else:
        assert fault is None


@pytest.mark.skipif(not packed_rows._OPTIONS, reason="torch has no such kernel")
def test_torchs_kernel_has_the_expected_signature() -> None:
    options = packed_rows._OPTIONS
    assert {"cu_seq_q", "cu_seq_k", "max_q", "max_k", "scale", "window_size"} <= set(options)
    assert list(options)[:3] == ["query", "key", "value"]
    query = torch.zeros(1, 4, 6, 8, dtype=torch.bfloat16)
    assert not packed_rows.supports_varlen(query, query, query)  # a CPU


def test_recurrent_layers_of_unknown_functions_are_padded(tmp_path: Path) -> None:
    reason = zoo_target(tmp_path, "minimax", num_local_experts=4).padding_reason
    assert reason is not None
    assert reason.startswith("mixes packed conversations (its states")


@pytest.mark.parametrize(("kind", "changes"), WITHOUT_PAGES)
def test_attention_that_pages_do_not_serve_is_packed(
    kind: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    target = zoo_target(tmp_path, kind, **changes)
    assert target.padding_reason is None
    assert_packing_is_exact(target, texts())


def leak_between_columns(output: Tensor, _: dict) -> Tensor:
    return output + 1e-3 * output.roll(1, 1)


def grow_with_the_column(output: Tensor, _: dict) -> Tensor:
    return output * (1 + 0.1 * torch.arange(output.shape[1], dtype=output.dtype)[None, :, None])


def depend_on_the_largest_position(output: Tensor, inputs: dict) -> Tensor:
    """Change the output as longrope does."""
    return output * (1 + (inputs["position_ids"].max() > 96))


def fail(output: Tensor, _: dict) -> Tensor:
    raise KeyError("key_cache")


def test_a_pass_that_fails_is_named_as_untested(tmp_path: Path) -> None:
    """It may fail because of the version of transformers."""
    target = zoo_target(tmp_path, "llama")
    change_layer(target, fail)
    version = transformers.__version__
    expected = f"could not be tested with transformers {version} (KeyError: 'key_cache')"
    assert str(target.padding_reason).startswith(expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (leak_between_columns, "mixes packed"),
        (depend_on_the_largest_position, "mixes packed"),
        (grow_with_the_column, "unlike single ones"),
    ],
)
def test_faults_in_custom_code_are_found(
    change: Any, message: str, dtype: str, tmp_path: Path
) -> None:
    target = zoo_target(tmp_path, "llama", dtype=dtype)
    change_layer(target, change)
    assert message in str(target.padding_reason)
