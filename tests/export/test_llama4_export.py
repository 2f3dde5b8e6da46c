"""The dense Llama 4 drafter in vLLM's layout: names, shapes and keys of servers §1.2."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from draftlab.errors import UserError
from draftlab.export.launch_text import vllm_text
from draftlab.export.layout import Export
from draftlab.heads.folder import load_config, load_head
from draftlab.heads.vllm_config import native_config
from draftlab.target_model.parts import load_parts
from tests.helpers.dense_attention import run_llama4_head
from tests.helpers.export_toys import (
    HIDDEN,
    LAYERS,
    MAX_LENGTH,
    VOCAB,
    MakeHead,
    change_config,
    change_tensors,
    export,
    read_config,
    read_tensors,
    verify,
)
from tests.helpers.llama4_reader import Reader

LLAMA4 = {
    "family": "eagle_llama4",
    "boundaries": (LAYERS,),
    "draft_vocab_size": VOCAB,
    "num_layers": 2,
    "llama4": {
        "no_rope_layers": (1, 0),
        "attention_chunk_size": 5,
        "use_qk_norm": True,
        "attn_temperature_tuning": True,
        "floor_scale": 3,
        "attn_scale": 0.5,
    },
}
LAYER = {
    "input_layernorm.weight": (HIDDEN,),
    "post_attention_layernorm.weight": (HIDDEN,),
    "self_attn.q_proj.weight": (32, HIDDEN),
    "self_attn.k_proj.weight": (16, HIDDEN),
    "self_attn.v_proj.weight": (16, HIDDEN),
    "self_attn.o_proj.weight": (HIDDEN, 32),
    "feed_forward.gate_proj.weight": (40, HIDDEN),
    "feed_forward.up_proj.weight": (40, HIDDEN),
    "feed_forward.down_proj.weight": (HIDDEN, 40),
}


@pytest.fixture
def out(make_head: MakeHead, target: Path, tmp_path: Path) -> Path:
    return export(make_head(**LLAMA4), target, tmp_path / "out", "vllm")


def test_tensors(out: Path, target: Path) -> None:
    """There is no lm_head (the target's is used) and no map; the target's embeddings are there."""
    tensors = read_tensors(out)
    expected = {
        "embed_tokens.weight": (VOCAB, HIDDEN),
        "fc.weight": (HIDDEN, 2 * HIDDEN),
        "norm.weight": (HIDDEN,),
    } | {f"layers.{n}.{name}": shape for n in range(2) for name, shape in LAYER.items()}
    assert {name: tuple(t.shape) for name, t in tensors.items()} == expected
    assert torch.equal(tensors["embed_tokens.weight"], load_parts(target).embeddings)


def test_config(out: Path) -> None:
    config = read_config(out)
    assert config["architectures"] == ["Llama4ForCausalLM"]
    assert config["model_type"] == "llama4_text"
    keys_without_default = {
        "draft_vocab_size": VOCAB,
        "yoco_global_kv_layer": None,
        "yoco_local_kv_layer": None,
        "moe_layers": [],
        "interleave_moe_layer_step": 0,
        "no_rope_layers": [1, 0],
        "use_qk_norm": True,
        "attn_temperature_tuning": True,
        "attention_chunk_size": 5,
        "floor_scale": 3,
        "attn_scale": 0.5,
        "intermediate_size": 40,
        "intermediate_size_mlp": 40,
        "num_hidden_layers": 2,
        "vocab_size": VOCAB,
        "max_position_embeddings": MAX_LENGTH,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    assert {key: config[key] for key in keys_without_default} == keys_without_default
    read = AutoConfig.from_pretrained(out)  # its checks are strict
    assert (type(read).__name__, read.moe_layers) == ("Llama4TextConfig", [])
    assert '"method": "eagle"' in (out / "launch.md").read_text()


@pytest.mark.parametrize("tuning", [True, False])
def test_launch_command_says_whether_the_targets_attention_is_tempered(
    tuning: bool, make_head: MakeHead, target: Path, tmp_path: Path
) -> None:
    folder, option = make_head(**LLAMA4), "--override-generation-config"
    plain = export(folder, target, tmp_path / "plain", "vllm")
    assert option not in (plain / "launch.md").read_text()
    config = {"model_type": "llama4_text", "attn_temperature_tuning": tuning}
    served = Export(load_config(folder), {"text_config": config}, "org/target", 3, torch.bfloat16)
    text = vllm_text(served, tmp_path)
    (line,) = [line for line in text.splitlines() if line.startswith("vllm serve")]
    expected = "true" if tuning else "false"
    assert line.endswith(option + f" '{{\"attn_temperature_tuning\": {expected}}}'")


def test_an_independent_reader_computes_the_head(out: Path, target: Path, tmp_path: Path) -> None:
    folder = tmp_path / "head"
    parts = load_parts(target)
    head = load_head(
        folder, target_tensors=parts.shared_tensors, dtype=torch.float32, device="cpu"
    ).double()
    reader = Reader(read_config(out), read_tensors(out))
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, VOCAB, (13,), generator=generator)
    states = torch.randn(13, HIDDEN, generator=generator, dtype=torch.float64)
    outputs = run_llama4_head(head, tokens, states)
    normed = head.project_features(states)
    for position, (token, state) in enumerate(zip(tokens.tolist(), normed, strict=True)):
        expected = reader.step(token, state, position)
        torch.testing.assert_close(outputs[position], expected, rtol=0, atol=1e-5)


def test_changes_of_the_config_do_not_reach_the_head(make_head: MakeHead, target: Path) -> None:
    """vLLM inserts the target's layers into `no_rope_layers` of the config in place."""
    head = load_config(make_head(**LLAMA4))
    before = copy.deepcopy(head)
    for _ in range(2):
        config = native_config(head, "bfloat16")
        assert config["no_rope_layers"] == [1, 0]
        config["no_rope_layers"][:0] = [0] * LAYERS
        config["moe_layers"].append(1)
        config["rope_parameters"]["rope_theta"] = 1.0
    assert head == before


@pytest.mark.parametrize("program", ["speculators", "sglang", "llamacpp"])
def test_refusals_of_other_programs_name_vllm(
    program: str, make_head: MakeHead, target: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"cannot hold dense Llama 4 heads: .*--to vllm"):
        export(make_head(**LLAMA4), target, tmp_path / "out", program)


@pytest.mark.parametrize("change", ["weight", "config", "embeddings"])
def test_a_changed_export_is_found(change: str, out: Path, target: Path, tmp_path: Path) -> None:
    head = tmp_path / "head"
    verify(out, head, target, "vllm")
    if change == "config":
        change_config(out, no_rope_layers=[0] * LAYERS + [1, 0])
    else:
        name = "embed_tokens.weight" if change == "embeddings" else "fc.weight"
        change_tensors(out, lambda tensors: tensors[name][3, 4].add_(1))
    with pytest.raises(UserError, match=r"differs|expected"):
        verify(out, head, target, "vllm")
