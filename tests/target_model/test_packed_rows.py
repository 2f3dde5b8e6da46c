"""Conversations side by side in a row get the states they have alone, or are kept from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from draftlab.target_model import attention, probe
from draftlab.target_model import packed_rows as documents
from draftlab.target_model.model import Target, TargetSettings, load_target
from draftlab.target_model.packed_rows import Documents
from draftlab.target_model.parts import text_decoder
from tests.helpers.zoo import ZOO, zoo_folder
from tests.target_model.test_replacements import LATENT, load, texts
from tests.target_model.test_states import close

BOUNDARIES = (0, 2, 3)


def beside(target: Target, rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Features and last states [T, …] of texts side by side."""
    placed = Documents.of([len(row) for row in rows], target.device)
    states = target.states(torch.cat(rows)[None], BOUNDARIES, documents=placed)
    return states.features[0], states.last[0]


def alone(target: Target, rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The same, each in a pass of its own."""
    passes = [target.states(row[None], BOUNDARIES) for row in rows]
    return torch.cat([p.features[0] for p in passes]), torch.cat([p.last[0] for p in passes])


@pytest.mark.parametrize("kind", list(ZOO))
def test_states_side_by_side_are_those_alone(kind: str, tmp_path: Path) -> None:
    """Over the borders of windows, chunks and temperatures (16 positions at most), and of one."""
    target = load(zoo_folder(tmp_path, kind))
    assert target.why_padded is None
    rows = [*texts(), torch.tensor([7])]
    for found, expected in zip(beside(target, rows), alone(target, rows), strict=True):
        close(found, expected)


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
    """What torch says of its kernel, written out: [T, heads, head_dim]."""
    assert begins is begins_k
    assert (begins.dtype, longest, window_size[1]) == (torch.int32, longest_k, 0)
    assert longest == int(begins.diff().max())
    assert enable_gqa or "enable_gqa" not in documents._OPTIONS
    group, left = query.shape[1] // key.shape[1], window_size[0]
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    place = torch.arange(len(query))
    number = torch.bucketize(place, begins[1:], right=True)
    ago = place[:, None] - place
    seen = (number[:, None] == number) & (ago >= 0) & ((ago <= left) | (left < 0))
    scores = torch.einsum("qhd,khd->hqk", query, key) * (scale or query.shape[-1] ** -0.5)
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value)


@pytest.mark.parametrize("kind", ["llama", "mistral", "granite", "llama4_text", "cohere2"])
def test_one_kernel_for_all_of_a_row(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How the kernel of a GPU is asked: groups of heads, windows, chunks, a scale of its own."""
    target = load(zoo_folder(tmp_path, kind))
    expected = alone(target, texts())
    calls = []

    def counted(*args: Any, **options: Any) -> Tensor:
        calls.append(options)
        return varlen(*args, **options)

    monkeypatch.setattr(documents, "varlen_attn", counted)
    monkeypatch.setattr(attention, "one_kernel_serves", lambda *_: True)
    for found, wanted in zip(beside(target, texts()), expected, strict=True):
        close(found, wanted)
    assert len(calls) == target.num_layers


@pytest.mark.parametrize("kind", ["llama", "llama4_text", "gpt_oss"])
def test_a_gpu_gets_padded_rows_where_no_kernel_takes_all_of_a_row(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A small kernel for every conversation and layer took five times as long as padding."""
    target = load(zoo_folder(tmp_path, kind))
    fault = "one by one", probe._at_once, 0.0, torch.amax
    assert "no kernel for torch.float32 heads of" in probe._fault(target, *fault)
    monkeypatch.setattr(documents, "varlen_attn", varlen)
    monkeypatch.setattr(attention, "one_kernel_serves", lambda *rows: True)
    found = probe._fault(target, *fault)
    assert (found or "").endswith("with sinks or capped scores" if kind == "gpt_oss" else "")
    assert (found is None) == (kind != "gpt_oss")


@pytest.mark.skipif(not documents._OPTIONS, reason="torch has no such kernel")
def test_torch_has_the_kernel_as_it_is_called() -> None:
    options = documents._OPTIONS
    assert {"cu_seq_q", "cu_seq_k", "max_q", "max_k", "scale", "window_size"} <= set(options)
    assert list(options)[:3] == ["query", "key", "value"]
    query = torch.zeros(1, 4, 6, 8, dtype=torch.bfloat16)
    assert not documents.one_kernel_serves(query, query, query)  # a CPU


_LINEAR = {  # Qwen3-Next's layers with a state
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


@pytest.mark.parametrize(
    ("kind", "changes"), [("qwen3_next", _LINEAR), ("minimax", {"num_local_experts": 4})]
)
def test_recurrent_layers_are_found_out(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    reason = load(zoo_folder(tmp_path, kind, **changes)).why_padded
    assert reason is not None
    assert reason.startswith("mixes conversations that lie side by side in a row (its states")


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("deepseek_v3", LATENT), ("jetmoe", {"num_local_experts": 4, "kv_channels": 8})],
)
def test_what_pages_do_not_serve_lies_side_by_side(
    kind: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """Values of other sizes than keys; experts for queries."""
    target = load(zoo_folder(tmp_path, kind, **changes))
    assert target.why_padded is None
    for found, expected in zip(beside(target, texts()), alone(target, texts()), strict=True):
        close(found, expected)


class _Leaks(nn.Module):
    """A layer that adds a little of the token before, whosever it is."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        output = self.layer(hidden_states, **kwargs)
        return output + 1e-3 * output.roll(1, 1)


class _Counts(nn.Module):
    """A layer whose output grows with the place in the row."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        place = torch.arange(hidden_states.shape[1], dtype=hidden_states.dtype)[None, :, None]
        return self.layer(hidden_states, **kwargs) * (1 + 0.1 * place)


class _Longest(nn.Module):
    """A layer that follows the farthest position of a row, as longrope does."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states: Tensor, *, position_ids: Tensor, **kwargs: Any) -> Tensor:
        output = self.layer(hidden_states, position_ids=position_ids, **kwargs)
        return output * (1 + (position_ids.max() > 96))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("fault", "message"),
    [(_Leaks, "mixes conversations"), (_Longest, "mixes conversations"), (_Counts, "than alone")],
)
def test_faults_of_code_from_elsewhere_are_seen(
    fault: type[nn.Module], message: str, dtype: str, tmp_path: Path
) -> None:
    folder = str(zoo_folder(tmp_path, "llama"))
    target = load_target(TargetSettings(path=folder, device="cpu", dtype=dtype))
    _, layers, _ = text_decoder(target.model)
    layers[1] = fault(layers[1])
    assert message in str(target.why_padded)
