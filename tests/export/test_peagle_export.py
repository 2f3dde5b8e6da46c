"""Parallel heads in the speculators layout, whose model type is peagle."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from draftlab.errors import UserError
from draftlab.heads.folder import load_head
from tests.helpers.dense_attention import causal_attention
from tests.helpers.export_toys import (
    BOUNDARIES,
    HIDDEN,
    LLAMA3,
    MASK,
    MAX_LENGTH,
    PEAGLE,
    VOCAB,
    MakeHead,
    change_config,
    change_tensors,
    export,
    read_config,
    read_tensors,
    verify,
)
from tests.helpers.monitors import RecordingMonitor
from tests.helpers.plain_reader import read_and_run

WEIGHTS = "model.safetensors"
NESTED = ("speculators_config", "transformer_layer_config")
H, A, KV, D, INNER, DRAFT, F_ = HIDDEN, 4, 2, 8, 40, 40, len(BOUNDARIES) * HIDDEN


def shapes(layers: int, qk_norm: bool) -> dict[str, list[int]]:
    """Return the shapes of servers §9.2 and §9.3."""
    expected = {
        "embed_tokens.weight": [VOCAB, H],
        "fc.weight": [H, F_],
        "layers.0.hidden_norm.weight": [H],
        "mask_hidden": [1, 1, F_],
        "norm.weight": [H],
        "lm_head.weight": [DRAFT, H],
        "d2t": [DRAFT],
        "t2d": [VOCAB],
    }
    for i in range(layers):
        width = H if i else 2 * H
        expected |= {
            f"layers.{i}.self_attn.q_proj.weight": [A * D, width],
            f"layers.{i}.self_attn.k_proj.weight": [KV * D, width],
            f"layers.{i}.self_attn.v_proj.weight": [KV * D, width],
            f"layers.{i}.self_attn.o_proj.weight": [H, A * D],
            f"layers.{i}.input_layernorm.weight": [H],
            f"layers.{i}.post_attention_layernorm.weight": [H],
            f"layers.{i}.mlp.gate_proj.weight": [INNER, H],
            f"layers.{i}.mlp.up_proj.weight": [INNER, H],
            f"layers.{i}.mlp.down_proj.weight": [H, INNER],
        }
        if qk_norm:
            expected |= {f"layers.{i}.self_attn.{n}_norm.weight": [D] for n in "qk"}
    return expected


@pytest.mark.parametrize(("layers", "qk_norm"), [(1, False), (3, False), (2, True)])
def test_tensors_and_config_of_a_parallel_head(
    make_head: MakeHead, target: Path, tmp_path: Path, layers: int, qk_norm: bool
) -> None:
    head = make_head(**PEAGLE | {"num_layers": layers, "qk_norm": qk_norm})
    out = export(head, target, tmp_path / "out", dtype="float32")
    tensors = read_tensors(out)
    assert {name: list(t.shape) for name, t in tensors.items()} == shapes(layers, qk_norm)
    assert all(t.dtype == torch.float32 for n, t in tensors.items() if n not in ("d2t", "t2d"))
    stored = read_tensors(head)
    assert torch.equal(tensors["mask_hidden"].flatten(), stored["mask_hidden"].float().flatten())
    assert torch.equal(
        tensors["embed_tokens.weight"][MASK], stored["embed_tokens.weight"][MASK].float()
    )
    config = read_config(out)
    top = {
        "architectures": ["PEagleDraftModel"],
        "speculators_model_type": "peagle",
        "speculators_version": "0.9.0",
        "dtype": "float32",
        "tie_word_embeddings": False,
        "draft_vocab_size": DRAFT,
        "target_hidden_size": H,
        "eagle_aux_hidden_state_layer_ids": list(BOUNDARIES),
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "embed_requires_grad": True,
        "mask_token_id": MASK,
    }
    assert {key: config[key] for key in config.keys() - set(NESTED)} == top
    assert config["speculators_config"]["algorithm"] == "peagle"
    (proposal,) = config["speculators_config"]["proposal_methods"]
    assert proposal["speculative_tokens"] == 7
    layer = config["transformer_layer_config"]
    assert layer["model_type"] == ("qwen3" if qk_norm else "llama")
    assert layer["num_hidden_layers"] == layers
    assert layer["layer_types"] == ["full_attention"] * layers
    assert layer["num_aux_hidden_states"] == len(BOUNDARIES)
    assert layer["max_position_embeddings"] == MAX_LENGTH


@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated")
@pytest.mark.parametrize("qk_norm", [False, True])
def test_model_config_and_bare_config_read_the_same_layers(
    make_head: MakeHead, target: Path, tmp_path: Path, qk_norm: bool
) -> None:
    """The library builds a model's own config; vLLM sets attributes of a bare one."""
    head = make_head(**PEAGLE, qk_norm=qk_norm, rope_parameters=dict(LLAMA3))
    out = export(head, target, tmp_path / "out")

    def layer() -> dict:
        return read_config(out)["transformer_layer_config"]

    bare = PretrainedConfig()
    for key, value in layer().items():
        if key != "model_type":
            setattr(bare, key, value)
    full = (Qwen3Config if qk_norm else LlamaConfig)(**layer())
    assert full.model_type == layer()["model_type"]
    for key in layer().keys() - {"model_type", "rope_scaling", "rope_theta"}:
        assert getattr(full, key) == getattr(bare, key), key
    assert full.rope_parameters == LLAMA3


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize(("layers", "qk_norm"), [(1, False), (2, False), (2, True)])
@torch.no_grad()
def test_a_plain_reader_drafts_the_heads_logits_in_one_pass(
    make_head: MakeHead, target: Path, tmp_path: Path, layers: int, qk_norm: bool, before: bool
) -> None:
    folder = make_head(
        dtype=torch.float32,
        **PEAGLE | {"num_layers": layers},
        qk_norm=qk_norm,
        norm_before_residual=before,
        rope_parameters=dict(LLAMA3),
    )
    out = export(folder, target, tmp_path / "out")
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(MASK, (9,), generator=generator)
    features = torch.randn(9, F_, generator=generator)
    # Servers append slots with the file's mask token and feature.
    config, stored = read_config(out), read_tensors(out)
    slots = torch.full((3,), config["mask_token_id"])
    logits, ids = read_and_run(
        out,
        torch.cat([tokens, slots]),
        torch.cat([features, stored["mask_hidden"].flatten().expand(3, -1)]),
    )
    head = load_head(folder, embeddings=None, dtype=torch.float32, device="cpu")
    hidden = torch.cat([head.project_features(features), head.mask_state().expand(3, -1)])
    expected = head.logits(
        head.run(torch.cat([tokens, slots]), hidden, torch.arange(12), causal_attention)
    )
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(ids, head.target_ids(torch.arange(DRAFT)))
    assert expected.std() > 1  # constant logits would equal anything


@pytest.mark.parametrize(
    "name", ["mask_hidden", "embed_tokens.weight", "layers.1.mlp.up_proj.weight"]
)
def test_a_changed_tensor_is_found(
    make_head: MakeHead, target: Path, tmp_path: Path, name: str
) -> None:
    head = make_head(**PEAGLE)
    out = export(head, target, tmp_path / "out")
    change_tensors(out, lambda tensors: tensors[name].view(-1)[0].add_(1))
    with pytest.raises(UserError, match=name):
        verify(out, head, target)


def test_a_missing_or_flat_mask_hidden_is_found(
    make_head: MakeHead, target: Path, tmp_path: Path
) -> None:
    head = make_head(**PEAGLE)
    out = export(head, target, tmp_path / "out")
    tensors = read_tensors(out)
    mask = tensors.pop("mask_hidden")
    for changed, message in (
        (tensors, "mask_hidden is missing"),
        (tensors | {"mask_hidden": mask[0]}, "mask_hidden: expected shape"),
    ):
        save_file(changed, out / WEIGHTS, metadata={"format": "pt"})
        with pytest.raises(UserError, match=message):
            verify(out, head, target)


@pytest.mark.parametrize("value", [MASK + 1, None, ...])
def test_another_mask_token_in_the_config_is_found(
    make_head: MakeHead, target: Path, tmp_path: Path, value: object
) -> None:
    head = make_head(**PEAGLE)
    out = export(head, target, tmp_path / "out")
    change_config(out, mask_token_id=value)
    with pytest.raises(UserError, match=f"mask_token_id: expected {MASK}"):
        verify(out, head, target)


@pytest.mark.parametrize("drop", ["mask_hidden", "width"])
def test_a_parallel_head_without_its_mask_or_of_another_width_is_refused(
    make_head: MakeHead, target: Path, tmp_path: Path, drop: str
) -> None:
    head = make_head(**PEAGLE)
    tensors = read_tensors(head)
    mask = tensors.pop("mask_hidden")
    if drop == "width":
        tensors["mask_hidden"] = mask[:, :-HIDDEN].contiguous()
    save_file(tensors, head / WEIGHTS)
    width = rf"{F_}\], found .*{F_ - HIDDEN}\]"
    message = "missing mask_hidden" if drop == "mask_hidden" else width
    with pytest.raises(UserError, match=message):
        export(head, target, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_launch_commands_use_parallel_drafting(
    make_head: MakeHead, target: Path, tmp_path: Path
) -> None:
    out = export(make_head(**PEAGLE), target, tmp_path / "out", k=5)
    lines = (out / "launch.md").read_text().splitlines()
    alone, explicit = [shlex.split(line) for line in lines if line.startswith("vllm")]
    assert alone == ["vllm", "serve", str(out.resolve())]
    assert json.loads(explicit[4]) == {
        "model": str(out.resolve()),
        "method": "eagle3",
        "num_speculative_tokens": 5,
        "parallel_drafting": True,
    }
    assert "5 tokens a step, greedy, all in one pass" in (out / "launch.md").read_text()
    assert "`speculators_model_type: peagle`" in (out / "README.md").read_text()


@pytest.mark.parametrize("changed", [{}, PEAGLE])
def test_warning_above_the_trained_k_and_refusal_above_the_positions(
    make_head: MakeHead, target: Path, tmp_path: Path, changed: dict
) -> None:
    head, monitor = make_head(**changed), RecordingMonitor()
    export(head, target, tmp_path / "out", k=MAX_LENGTH - 1, monitor=monitor)
    assert "warning: export: 511 speculative tokens, but the head was trained for 7" in monitor.text
    with pytest.raises(UserError, match=f"the target's {MAX_LENGTH} positions, found {MAX_LENGTH}"):
        export(head, target, tmp_path / "out", k=MAX_LENGTH)
    (proposal,) = read_config(tmp_path / "out")["speculators_config"]["proposal_methods"]
    assert proposal["speculative_tokens"] == MAX_LENGTH - 1  # the earlier export stays
