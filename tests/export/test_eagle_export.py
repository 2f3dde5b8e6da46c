"""First-generation EAGLE heads for vLLM and SGLang: names, shapes, keys of servers §1.1, §6."""

from __future__ import annotations

import pytest

from tests.helpers.export_toys import EAGLE, HIDDEN, MAX_LENGTH, VOCAB, ExportHead


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
    assert ("fc.bias" in tensors) == (program == "sglang")
    assert "fc.bias" not in tensors or not tensors["fc.bias"].any()
    assert "layers.0.input_layernorm.weight" not in tensors
    assert "layers.1.input_layernorm.weight" in tensors
    assert config["architectures"] == [architecture]
    assert (config["model_type"], config["num_hidden_layers"]) == ("llama", 2)
    assert (config["hidden_size"], config["vocab_size"]) == (HIDDEN, VOCAB)
    assert config["draft_vocab_size"] == VOCAB
    assert config["max_position_embeddings"] == MAX_LENGTH  # the target's
    assert config["rope_parameters"]["rope_theta"] == config["rope_theta"] == 20000.0
    # vLLM would index layer_types behind the target's layers (§1.1).
    assert not {"layer_types", "eagle_aux_hidden_state_layer_ids", "eagle_config"} & config.keys()
    assert launch in exported.launch_text
