"""First-generation EAGLE heads for vLLM and SGLang: names, shapes, keys of servers §1.1, §6."""

from __future__ import annotations

import pytest

from tests.helpers.export_toys import EAGLE, HIDDEN, MAX_LENGTH, VOCAB, ExportHead

LAYER = {
    "post_attention_layernorm.weight": (HIDDEN,),
    "self_attn.q_proj.weight": (32, HIDDEN),
    "self_attn.k_proj.weight": (16, HIDDEN),
    "self_attn.v_proj.weight": (16, HIDDEN),
    "self_attn.o_proj.weight": (HIDDEN, 32),
    "mlp.gate_proj.weight": (40, HIDDEN),
    "mlp.up_proj.weight": (40, HIDDEN),
    "mlp.down_proj.weight": (HIDDEN, 40),
}
TENSORS = {f"layers.{n}.{name}": shape for n in (0, 1) for name, shape in LAYER.items()} | {
    "fc.weight": (HIDDEN, 2 * HIDDEN),
    "layers.1.input_layernorm.weight": (HIDDEN,),  # the first layer has none
}


@pytest.mark.parametrize(
    ("program", "architecture", "launch"),
    [
        ("vllm", "LlamaForCausalLM", '"method": "eagle"'),
        ("sglang", "LlamaForCausalLMEagle", "--speculative-algorithm EAGLE "),
    ],
)
def test_tensors_and_config(
    export_head: ExportHead, program: str, architecture: str, launch: str
) -> None:
    exported = export_head(program, max_position_embeddings=64, **EAGLE)
    tensors, config = exported.tensors, exported.config
    bias = {"fc.bias": (HIDDEN,)} if program == "sglang" else {}
    assert {name: tuple(t.shape) for name, t in tensors.items()} == TENSORS | bias
    assert not any(bool(tensors[name].any()) for name in bias)
    assert config["architectures"] == [architecture]
    assert (config["model_type"], config["num_hidden_layers"]) == ("llama", 2)
    assert (config["hidden_size"], config["vocab_size"]) == (HIDDEN, VOCAB)
    assert config["draft_vocab_size"] == VOCAB
    assert config["max_position_embeddings"] == MAX_LENGTH  # the target's
    assert config["rope_parameters"]["rope_theta"] == config["rope_theta"] == 20000.0
    # vLLM would index layer_types behind the target's layers (§1.1).
    assert not {"layer_types", "eagle_aux_hidden_state_layer_ids", "eagle_config"} & config.keys()
    assert launch in exported.launch_text
