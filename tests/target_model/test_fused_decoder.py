"""The fused decode path: transformers' states, on the kernels' references."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from draftlab.errors import UserError
from draftlab.kernels.linear import MAX_ROWS
from draftlab.kernels.paged_attention import slot_mapping
from draftlab.target_model.fused_decoder import FusedDecoder, fused_decoder, knows
from draftlab.target_model.model import States, Target, TargetSettings, load_target
from draftlab.target_model.path_check import check_agreement
from tests.helpers.zoo import SHAPE, zoo_folder

# Windows of 8 bite: the sequences below are longer.
KINDS = {
    "llama": ("llama", {"attention_bias": True}),
    "llama3 rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3 windows": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    ),
}


def load(path: Path, kind: str) -> Target:
    name, changes = KINDS[kind]
    zoo = {"tie_word_embeddings": False} | changes
    return load_target(TargetSettings(path=str(zoo_folder(path, name, **zoo)), device="cpu"))


@pytest.fixture(scope="module", params=list(KINDS))
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load(tmp_path_factory.mktemp("target"), request.param)


def feed(run: Target | FusedDecoder, target: Target, sequences: Tensor) -> list[Tensor]:
    """States of two rows fed in ragged chunks, padded; only those of real tokens."""
    cache = target.new_paged_cache(9, 4)
    table = torch.tensor([[3, 1, 8, 5, 0], [2, 7, 4, 6, 0]], dtype=torch.int32)
    done, seen = [0, 0], []
    for sizes in ((6, 3), (1, 5), (0, 2), (5, 1), (4, 4)):
        width = max(sizes)
        ids, positions = torch.zeros(2, width, dtype=torch.int64), torch.full((2, width), -1)
        for row, n in enumerate(sizes):
            ids[row, :n] = sequences[row, done[row] : done[row] + n]
            positions[row, :n] = torch.arange(done[row], done[row] + n)
            done[row] += n
        slots = slot_mapping(table, positions, 4)
        states = run.states(
            ids, (0, 2, 4), positions=positions, cache=cache.at(table, positions, slots)
        )
        seen += [states.features[positions >= 0], states.last[positions >= 0]]
    return seen


def test_states_and_logits_are_transformers(target: Target) -> None:
    before = {name: value.clone() for name, value in target.model.state_dict().items()}
    sequences = torch.randint(
        3, SHAPE["vocab_size"], (2, 20), generator=torch.Generator().manual_seed(0)
    )
    assert knows(target)
    fused = FusedDecoder(target)
    found, expected = feed(fused, target, sequences), feed(target, target, sequences)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        scale = float(other.abs().amax())
        torch.testing.assert_close(one / scale, other / scale, rtol=0, atol=2e-5)
    last = expected[-1]
    torch.testing.assert_close(fused.logits(last), target.logits(last), rtol=1e-4, atol=1e-4)
    check_agreement(fused.target, fused, "the fused path")

    after = target.model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    attention = target.layers[0].self_attn
    storages = {
        p.weight.untyped_storage().data_ptr()
        for p in (attention.q_proj, attention.k_proj, attention.v_proj)
    }
    assert storages == {fused.layers[0].qkv.untyped_storage().data_ptr()}  # nothing is held twice
    for one, other in zip(FusedDecoder(target).layers, fused.layers, strict=True):
        assert one.qkv.data_ptr() == other.qkv.data_ptr()
        assert torch.equal(one.qkv, other.qkv)


def test_a_cpu_target_keeps_to_transformers(target: Target) -> None:
    assert fused_decoder(target) is None


@pytest.fixture
def fresh(tmp_path: Path) -> Target:
    return load(tmp_path, "llama")


def test_what_is_not_known_is_left_to_transformers(fresh: Target) -> None:
    assert knows(fresh)
    handle = fresh.layers[2].mlp.register_forward_hook(lambda *_: None)
    assert not knows(fresh)
    handle.remove()
    fresh.layers[1].self_attn.forward = fresh.layers[1].self_attn.forward
    assert not knows(fresh)
    del fresh.layers[1].self_attn.forward
    fresh.decoder.rotary_emb.rope_type = "dynamic"
    assert not knows(fresh)
    fresh.decoder.rotary_emb.rope_type = "default"
    assert knows(fresh)
    gate = fresh.layers[3].mlp.gate_proj
    gate.bias = nn.Parameter(torch.zeros(gate.out_features))
    assert not knows(fresh)


@pytest.mark.parametrize("kind", ["gemma2", "granite"])
def test_other_architectures_are_not_known(kind: str, tmp_path: Path) -> None:
    folder = zoo_folder(tmp_path, kind)
    assert not knows(load_target(TargetSettings(path=str(folder), device="cpu")))


def test_check_runs_a_prompt_of_more_rows_than_kernels_of_few_take(
    fresh: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused = FusedDecoder(fresh)
    states = fused.states

    def wrong(token_ids: Tensor, *rest: Any, **options: Any) -> States:
        found = states(token_ids, *rest, **options)
        return States(found.features * (1.1 if token_ids.numel() > MAX_ROWS else 1), found.last)

    monkeypatch.setattr(fused, "states", wrong)
    with pytest.raises(UserError, match="differ in their states"):
        check_agreement(fresh, fused, "the fused path")


@pytest.mark.parametrize("fault", ["scale", "window", "eps", "rope", "norm"])
def test_check_finds_what_it_is_for(fault: str, fresh: Target) -> None:
    """Each a way in which a layer could differ from what is written in fused.py."""
    fused = FusedDecoder(fresh)
    check_agreement(fused.target, fused, "the fused path")
    attention = fresh.layers[1].self_attn
    if fault == "scale":
        attention.scaling *= 1.1
    elif fault == "window":
        object.__setattr__(fused.layers[1], "window", 6)
    elif fault == "eps":
        fused.eps += 0.05
    elif fault == "rope":
        fused.scaling = 1.05
    else:
        object.__setattr__(fused.layers[3], "mlp_norm", fused.layers[3].mlp_norm + 0.02)
    with pytest.raises(UserError, match="differ in their"):
        check_agreement(fused.target, fused, "the fused path")
