"""Layers that would mix rows of different lengths are replaced, frozen or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draftlab.errors import UserError
from draftlab.target_model import (
    attention,
    check_capabilities,
    replacements,
)
from draftlab.target_model.model import Target
from draftlab.target_model.paged_cache import CACHE_NAMES
from draftlab.target_model.recurrent_layer import (
    RecurrentStates,
    planned_state_bytes,
    recurrent_layers,
)
from tests.helpers.hybrid_zoo import HYBRID
from tests.helpers.ragged import row_cache, run_ragged
from tests.helpers.zoo import (
    SHAPE,
    WITHOUT_PAGES,
    ZOO,
    assert_close,
    change_layer,
    load_on_cpu,
    random_texts,
    wide,
    zoo_folder,
    zoo_target,
)

ATTEND_READS = attention.attend_reads


def test_llama4_without_the_replacement_is_wrong_and_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, texts = zoo_folder(tmp_path, "llama4_text"), random_texts((70, 3, 33), seed=3)

    def last_states(target: Target) -> Tensor:
        cache, passes = row_cache(target, range(3), 80), [(65, 0, 28), (5, 3, 5)]
        return run_ragged(target, cache, texts, passes)[0][1]

    right = last_states(load_on_cpu(folder))
    monkeypatch.setattr(replacements, "use_true_positions", lambda layers: None)
    target = load_on_cpu(folder)
    with pytest.raises(UserError, match="Llama4TextModel takes positions from the length"):
        target.new_cache(3, 80)
    monkeypatch.setattr(Target, "_check_once", lambda self, check: None)
    assert float((last_states(target) - right).abs().max()) > 0.1


def test_llama4_replaces_only_layers_with_a_temperature(tmp_path: Path) -> None:
    layers = zoo_target(tmp_path / "tempered", "llama4_text").layers
    replaced = [len(layer.self_attn.q_proj._forward_hooks) for layer in layers]
    assert replaced == [0, 1, 0, 1]
    plain = zoo_target(tmp_path / "plain", "llama4_text", attn_temperature_tuning=False)
    assert not any(layer.self_attn.q_proj._forward_hooks for layer in plain.layers)


@pytest.mark.parametrize(
    ("kind", "changes", "max_length"),
    [
        ("phi3", {}, 96),  # its short set of frequencies ends there
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
            SHAPE["max_position_embeddings"],
        ),
    ],
)
def test_rope_does_not_follow_the_longest_text(
    kind: str, changes: dict[str, Any], max_length: int, tmp_path: Path
) -> None:
    target = zoo_target(tmp_path, kind, **changes)
    assert target.max_length == max_length
    assert {layer.self_attn.config.max_position_embeddings for layer in target.layers} == {128}
    before = target.decoder.rotary_emb.inv_freq.clone()
    short, beyond = torch.tensor([[3, 4, 5]]), torch.full((1, max_length + 70), 7)
    expected = target.states(short).last
    target.states(beyond)  # transformers would change the frequencies here
    assert torch.equal(target.decoder.rotary_emb.inv_freq, before)
    assert torch.equal(target.states(short).last, expected)


def test_longrope_that_follows_the_longest_row_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replacements, "freeze_rope", lambda decoder: None)
    target = zoo_target(tmp_path, "phi3")
    with pytest.raises(UserError, match="Phi3Model treats a row differently when the row beside"):
        target.new_cache(2, 8)


def test_longrope_with_code_of_its_own_is_refused(tmp_path: Path) -> None:
    rope = ZOO["phi3"]["rope_parameters"] | {"short_mscale": 1.1, "long_mscale": 1.2}
    folder = zoo_folder(
        tmp_path,
        "phimoe",
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters=rope,
        original_max_position_embeddings=96,
    )
    with pytest.raises(UserError, match="PhimoeRotaryEmbedding with longrope"):
        load_on_cpu(folder)


def test_recurrent_layers_outside_transformers_caches_are_refused(tmp_path: Path) -> None:
    """Their states can be recorded; drafts cannot be rolled back."""
    target = zoo_target(tmp_path, "minimax", num_local_experts=4)
    assert target.states(torch.tensor([[3, 4]])).last.shape == (1, 2, 32)
    assert not target.recurrent
    with pytest.raises(UserError, match="MiniMaxModel"):
        target.new_paged_cache(4, 16)


@pytest.mark.parametrize("kind", HYBRID)
def test_recurrent_layers_keep_a_state_for_each_request(kind: str, tmp_path: Path) -> None:
    target = zoo_target(tmp_path, kind)
    assert target.recurrent
    cache = target.new_paged_cache(4, 16, num_rows=3)
    assert cache.states.num_rows == 3
    assert sum(target.state_bytes.values()) == planned_state_bytes(target.decoder) > 0
    with pytest.raises(UserError, match="the reference engine keeps no recurrent states"):
        target.new_cache(1, 8)


def test_a_recurrent_layer_that_mixes_rows_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = zoo_target(tmp_path, "qwen3_next")
    at = RecurrentStates.at
    monkeypatch.setattr(
        RecurrentStates, "at", lambda states, rows, lengths: at(states, 0 * rows, lengths)
    )
    with pytest.raises(UserError, match="Qwen3NextModel treats a row differently beside other"):
        target.new_paged_cache(4, 16)


@pytest.mark.parametrize(("kind", "changes"), WITHOUT_PAGES)
def test_attention_that_pages_do_not_serve_is_refused(
    kind: str, changes: dict[str, object], tmp_path: Path
) -> None:
    """JetMoE's attention would be silently wrong."""
    target = zoo_target(tmp_path, kind, **changes)
    target.new_cache(1, 8)
    with pytest.raises(UserError, match="pages of keys do not serve"):
        target.new_paged_cache(4, 16)


class RunningSum:
    """A layer's output with a little of all earlier outputs, as in recurrent layers."""

    def __call__(self, output: Tensor, inputs: dict) -> Tensor:
        total = output.sum(1, keepdim=True)
        self.total = total if int(inputs["position_ids"].min()) == 0 else self.total + total
        return output + 1e-3 * self.total


def grow_with_the_cache(output: Tensor, inputs: dict) -> Tensor:
    return output * (
        1 + 1e-9 * next(inputs[name] for name in CACHE_NAMES if name in inputs).get_seq_length()
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (RunningSum(), "keeps a state of tokens"),
        (grow_with_the_cache, "positions from the length of the cache"),
    ],
)
def test_faults_in_custom_code_are_found(change: Any, message: str, tmp_path: Path) -> None:
    target = zoo_target(tmp_path, "llama")
    change_layer(target, change)
    with pytest.raises(UserError, match=message):
        target.new_paged_cache(4, 16)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A target with random experts, whose routers are near ties everywhere."""
    path = tmp_path_factory.mktemp("mixture")
    return zoo_target(path, "gpt_oss", dtype="bfloat16", **wide("gpt_oss"))


def test_other_rounding_is_accepted(mixture: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other kernels round so, and routers then select other experts for some tokens."""

    def rounded_otherwise(query: Tensor, *rest: object, **scores: object) -> Tensor:
        attended = ATTEND_READS(query, *rest, **scores)
        noise = torch.randn(attended.shape, generator=torch.Generator().manual_seed(7))
        return (attended * (1 + noise * 2**-7)).to(attended.dtype)

    monkeypatch.setattr(attention, "attend_reads", rounded_otherwise)
    with torch.inference_mode():
        rows, pages = check_capabilities._rows_and_pages(mixture)
    changes = (rows - pages).norm(dim=-1) / rows.norm(dim=-1)
    assert (changes > 0.2).sum() > changes.numel() / 2, "no router selects other experts"
    check_capabilities.check_pages(mixture)


def test_a_misread_cache_is_refused(mixture: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are read from other slots."""

    def misread(query: Tensor, keys: Tensor, values: Tensor, *rest: object, **scores: object):
        return ATTEND_READS(query, keys, values.roll(1, 0), *rest, **scores)

    monkeypatch.setattr(attention, "attend_reads", misread)
    with pytest.raises(UserError, match="pages of keys do not serve"):
        check_capabilities.check_pages(mixture)


@torch.inference_mode()
def test_time_steps_of_nemotron_h_have_one_limit(tmp_path: Path) -> None:
    """transformers 5.23 limits them to 0.001 in prompts alone, and not by its config's limits."""
    target = zoo_target(tmp_path, "nemotron_h", time_step_min=0.001, seed=1)
    layers = recurrent_layers(target.decoder).values()
    assert {layer.time_step_limit for layer in layers} == {(0.0, float("inf"))}
    for layer in layers:
        layer.time_step_limit = (0.7, 0.75)  # far more than its time steps
    for experiment in (check_capabilities._in_steps, check_capabilities._beside_other_rows):
        assert_close(*reversed(experiment(target)))
