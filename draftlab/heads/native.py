"""config.json of a head folder: vLLM's native description, generated from draftlab.json."""

from __future__ import annotations

from typing import Any

from draftlab.heads.config import HeadConfig, Llama4Config


def native_config(config: HeadConfig, dtype: str) -> dict[str, Any]:
    """config.json in vLLM's native layout (servers §8), a pure function of draftlab.json."""
    if config.family == "eagle":
        # Served with method eagle, which makes it EagleLlamaForCausalLM (servers §1.1).
        return {"architectures": ["LlamaForCausalLM"], "model_type": "llama"} | _shape(
            config, dtype
        )
    if config.llama4 is not None:
        return _llama4_config(config, config.llama4, dtype)
    # The name that becomes vLLM's class with norms of q and k; it has no other for these heads.
    architecture = "Eagle3Qwen3ForCausalLM" if config.qk_norm else "LlamaForCausalLMEagle3"
    nested = [b - 1 for b in config.boundaries]  # SGLang counts outputs of layers
    mask = config.mask_token_id
    # Readers differ in the key they look for (servers §1.5).
    names = ("mask_token_id", "ptd_token_id", "pard_token") if mask is not None else ()
    return {
        "architectures": [architecture],
        "model_type": "qwen3" if config.qk_norm else "llama",
        **_shape(config, dtype),
        "eagle_aux_hidden_state_layer_ids": list(config.boundaries),
        "num_aux_hidden_states": len(config.boundaries),
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": nested,
        },
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        **dict.fromkeys(names, mask),
    }


def _llama4_config(config: HeadConfig, kind: Llama4Config, dtype: str) -> dict[str, Any]:
    """Served with method eagle, which makes it EagleLlama4ForCausalLM (servers §1.2).

    `no_rope_layers` is of the head's layers alone: vLLM puts the target's before them itself. The
    keys of experts and of shared caches have no default there, and others here.
    """
    return {
        "architectures": ["Llama4ForCausalLM"],
        "model_type": "llama4_text",
        **_shape(config, dtype),
        **kind.model_dump(mode="json"),
        "intermediate_size_mlp": config.intermediate_size,
        "moe_layers": [],
        "interleave_moe_layer_step": 0,
        "yoco_global_kv_layer": None,
        "yoco_local_kv_layer": None,
    }


def _shape(config: HeadConfig, dtype: str) -> dict[str, Any]:
    """What the layers of any family are like, in either spelling of RoPE."""
    rope = dict(config.rope_parameters)
    rope.setdefault("rope_type", "default")
    scaling = {k: v for k, v in rope.items() if k != "rope_theta"}
    return {
        "dtype": dtype,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": config.num_layers,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": False,
        "mlp_bias": False,
        "bias": False,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "tie_word_embeddings": False,
        "target_hidden_size": config.target_hidden_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
        "rope_parameters": rope,
    }
