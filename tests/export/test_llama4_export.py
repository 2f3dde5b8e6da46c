"""The dense Llama 4 drafter in vLLM's layout: names, shapes and keys of servers §1.2."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from draftlab.export.launch import vllm_text
from draftlab.export.layout import Export
from draftlab.heads.folder import load_config
from draftlab.heads.vllm_config import native_config
from draftlab.target_model.parts import load_parts
from tests.helpers.export_toys import LAYERS, LLAMA4, MAX_LENGTH, VOCAB, ExportHead


def test_tensors_and_config(export_head: ExportHead) -> None:
    """There is no lm_head (the target's is used) and no map; the target's embeddings are there."""
    exported = export_head("vllm", **LLAMA4)
    tensors, config = exported.tensors, exported.config
    assert not {"lm_head.weight", "d2t", "t2d"} & tensors.keys()
    embeddings = load_parts(exported.target).embeddings.bfloat16()
    assert torch.equal(tensors["embed_tokens.weight"], embeddings)
    keys_without_default = {
        "architectures": ["Llama4ForCausalLM"],
        "model_type": "llama4_text",
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
        "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0},
    }
    assert {key: config[key] for key in keys_without_default} == keys_without_default
    read = AutoConfig.from_pretrained(exported.folder)  # its checks are strict
    assert (type(read).__name__, read.moe_layers) == ("Llama4TextConfig", [])
    assert '"method": "eagle"' in exported.launch_text


@pytest.mark.parametrize("tuning", [True, False])
def test_launch_command_says_whether_the_targets_attention_is_tempered(
    tuning: bool, export_head: ExportHead, tmp_path: Path
) -> None:
    exported, option = export_head("vllm", **LLAMA4), "--override-generation-config"
    assert option not in exported.launch_text  # the target is no Llama 4
    config = {"model_type": "llama4_text", "attn_temperature_tuning": tuning}
    head = load_config(exported.head)
    served = Export(head, {"text_config": config}, "org/target", 3, torch.bfloat16)
    lines = vllm_text(served, tmp_path).splitlines()
    (line,) = [line for line in lines if line.startswith("vllm serve")]
    expected = "true" if tuning else "false"
    assert line.endswith(option + f" '{{\"attn_temperature_tuning\": {expected}}}'")


def test_changes_of_the_config_do_not_reach_the_head(make_head: Callable[..., Path]) -> None:
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
