"""Layers that would mix rows of different lengths are replaced, frozen or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draftlab.errors import UserError
from draftlab.kernels.paged_attention import slot_mapping
from draftlab.target_model import llama4, replacements
from draftlab.target_model.fused_decoder import has_known_layers
from draftlab.target_model.model import Target
from draftlab.target_model.parts import load_parts
from tests.helpers.zoo import (
    LINEAR_ATTENTION,
    SHAPE,
    WITHOUT_PAGES,
    ZOO,
    assert_close,
    change_layer,
    eager_model,
    load_on_cpu,
    random_texts,
    zoo_folder,
    zoo_target,
)

LENGTHS = (70, 3, 33)  # Llama 4's temperature in the zoo steps every 16 positions


def texts() -> list[Tensor]:
    return random_texts(LENGTHS, seed=3)


def last_five(target: Target, paged: bool) -> Tensor:
    """Return logits [3, 5, V] of the texts' last tokens, decoded in one batch after the rest."""
    size, width = 16, 5
    rows = target.new_cache(3, 80)
    pages = target.new_paged_cache(3 * width + 1, size)
    table = (torch.randperm(3 * width).view(3, width) + 1).int()
    logits = torch.zeros(3, 5, target.vocab_size)
    for first in (True, False):
        chunks = [t[:-5] if first else t[-5:] for t in texts()]
        starts = [0 if first else len(t[:-5]) for t in texts()]
        longest = max(map(len, chunks))
        ids = torch.zeros(3, longest, dtype=torch.int64)
        positions = torch.full((3, longest), -1)
        for row, (chunk, start) in enumerate(zip(chunks, starts, strict=True)):
            ids[row, : len(chunk)] = chunk
            positions[row, : len(chunk)] = torch.arange(start, start + len(chunk))
        if paged:
            cache = pages.at(table, positions, slot_mapping(table, positions, size))
        else:
            cache = rows.at(range(3), positions, int(positions.max()) + 1)
        states = target.states(ids, positions=positions, cache=cache).last
        if not first:
            for row, chunk in enumerate(chunks):
                logits[row, -len(chunk) :] = target.logits(states[row, : len(chunk)])
    return logits


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("kind", ["llama4_text", "ministral3", "phi3", "gpt_oss"])
def test_rows_of_different_lengths_are_as_alone(kind: str, paged: bool, tmp_path: Path) -> None:
    """A row's logits are those of transformers' own model run on that row, without a cache."""
    folder = zoo_folder(tmp_path, kind)
    logits = last_five(load_on_cpu(folder), paged)
    alone = eager_model(folder)
    for row, text in enumerate(texts()):
        with torch.inference_mode():
            expected = alone(input_ids=text[None], use_cache=False).logits[0, -5:]
        assert_close(logits[row, -len(expected) :], expected)


def test_llama4_without_the_replacement_is_wrong_and_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = zoo_folder(tmp_path, "llama4_text")
    right = last_five(load_on_cpu(folder), False)
    monkeypatch.setattr(llama4, "use_true_positions", lambda layers: None)
    target = load_on_cpu(folder)
    with pytest.raises(UserError, match="Llama4TextModel takes positions from the length"):
        target.new_cache(3, 80)
    monkeypatch.setattr(Target, "_check_once", lambda self, check: None)
    assert float((last_five(target, False) - right).abs().max()) > 0.1


def test_llama4_replaces_only_layers_with_a_temperature(tmp_path: Path) -> None:
    layers = zoo_target(tmp_path / "tempered", "llama4_text").layers
    replaced = [type(layer) is llama4.PositionedLayer for layer in layers]
    assert replaced == [False, True, False, True]
    plain = zoo_target(tmp_path / "plain", "llama4_text", attn_temperature_tuning=False)
    assert not any(isinstance(layer, llama4.PositionedLayer) for layer in plain.layers)


def test_replaced_layers_are_not_known_layers(tmp_path: Path) -> None:
    assert not has_known_layers(zoo_target(tmp_path / "llama4", "llama4_text"))
    target = zoo_target(tmp_path / "llama", "llama")
    assert has_known_layers(target)
    for module in (target.layers[2], target.layers[2].self_attn, target.layers[2].mlp):
        cls = type(module)
        module.__class__ = type("Positioned", (cls,), {})  # as target_model/llama4.py does
        assert not has_known_layers(target)
        module.__class__ = type(cls.__name__, (cls,), {})  # the same name, another module
        assert not has_known_layers(target)
        module.__class__ = cls
    assert has_known_layers(target)


def test_multimodal_llama4_gives_its_text_model(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Tensor names are prefixed and the config is nested."""
    folder = zoo_folder(tmp_path, "llama4")
    capfd.readouterr()
    target = load_on_cpu(folder)
    assert capfd.readouterr() == ("", "")  # transformers prints no table of tensors
    (note,) = target.notes
    assert "multi_modal_projector (1), vision_model (25)" in note
    whole = eager_model(folder)
    ids = texts()[0][None]
    with torch.inference_mode():
        expected = whole(input_ids=ids, use_cache=False).logits
    assert_close(target.logits(target.states(ids).last), expected)
    assert target.num_layers == SHAPE["num_hidden_layers"]
    parts = load_parts(tmp_path)
    assert torch.equal(parts.lm_head, target.parts.lm_head)
    assert torch.equal(parts.embeddings, target.parts.embeddings)


def test_longrope_uses_its_short_set(tmp_path: Path) -> None:
    """`max_length` is the set's limit; the configs of layers do not change."""
    target = zoo_target(tmp_path, "phi3")
    assert target.max_length == 96
    assert {layer.self_attn.config.max_position_embeddings for layer in target.layers} == {128}
    before = target.decoder.rotary_emb.inv_freq.clone()
    short, beyond = torch.tensor([[3, 4, 5]]), torch.full((1, 120), 7)
    expected = target.states(short).last
    target.states(beyond)  # transformers would switch to the long set here
    assert torch.equal(target.decoder.rotary_emb.inv_freq, before)
    assert torch.equal(target.states(short).last, expected)


def test_longrope_that_follows_the_longest_row_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replacements, "freeze_rope", lambda decoder: None)
    target = zoo_target(tmp_path, "phi3")
    with pytest.raises(UserError, match="Phi3Model treats a row differently when the row beside"):
        target.new_cache(2, 8)


def test_dynamic_rope_does_not_grow(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    target = zoo_target(tmp_path, "llama", rope_parameters=rope)
    short = torch.tensor([[3, 4, 5]])
    expected = target.states(short).last
    assert target.max_length == SHAPE["max_position_embeddings"]
    target.states(torch.full((1, 200), 7))
    assert torch.equal(
        target.decoder.rotary_emb.inv_freq, target.decoder.rotary_emb.original_inv_freq
    )
    assert torch.equal(target.states(short).last, expected)


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


def test_recurrent_layers_are_refused(tmp_path: Path) -> None:
    """Their states can be recorded; drafts cannot be rolled back."""
    target = zoo_target(tmp_path, "qwen3_next", **LINEAR_ATTENTION)
    assert target.states(torch.tensor([[3, 4]])).last.shape == (1, 2, 32)
    with pytest.raises(UserError, match="Qwen3NextModel keeps a state of tokens"):
        target.new_cache(1, 8)


@pytest.mark.parametrize(("kind", "changes"), WITHOUT_PAGES)
def test_attention_that_pages_do_not_serve_is_refused(
    kind: str, changes: dict[str, object], tmp_path: Path
) -> None:
    """Latent attention fails on pages; JetMoE's attention would be silently wrong."""
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
    return output * (1 + 1e-9 * inputs["past_key_values"].get_seq_length())


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
