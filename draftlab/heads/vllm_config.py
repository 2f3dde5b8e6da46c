"""config.json of a head folder in vLLM's native layout, as functions of draftlab.json (servers
§8)."""

from __future__ import annotations

from typing import Any

from draftlab.heads.config import HeadConfig
from draftlab.heads.family import get_family

MASK_TOKEN_KEYS = ("mask_token_id", "ptd_token_id", "pard_token")
"""Keys under which different programs read the mask token (servers §1.5)."""

SELECTOR_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
"""Keys of a DFlash2 config that shape its tensors, and fields of draftlab.json."""
FACTOR_KEYS = {
    "input_embedding_scale": "embedding_scale",
    "output_multiplier": "logit_scale",
    "final_logit_softcapping": "logit_softcap",
}
"""Keys of a DFlash2 config for what multiplies embeddings and logits → fields of draftlab.json."""


def native_config(config: HeadConfig, dtype: str) -> dict[str, Any]:
    """Return config.json of a head of any family; empty: vLLM cannot load it."""
    return get_family(config.family).native_config(config, dtype)


def eagle3_native_config(config: Any, dtype: str) -> dict[str, Any]:
    """Return config.json of an EAGLE3 head, or of a parallel head with its mask token."""
    # vLLM maps this name to its only class with norms of q and k for these heads.
    architecture = "Eagle3Qwen3ForCausalLM" if config.qk_norm else "LlamaForCausalLMEagle3"
    mask_token = getattr(config, "mask_token_id", None)
    keys = MASK_TOKEN_KEYS if mask_token is not None else ()
    return {
        "architectures": [architecture],
        "model_type": "qwen3" if config.qk_norm else "llama",
        **layer_fields(config, dtype),
        "eagle_aux_hidden_state_layer_ids": list(config.boundaries),
        "num_aux_hidden_states": len(config.boundaries),
        "eagle_config": {
            "use_aux_hidden_state": True,
            # SGLang counts outputs of layers.
            "eagle_aux_hidden_state_layer_ids": [b - 1 for b in config.boundaries],
        },
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        **sliding_fields(config),
        **dict.fromkeys(keys, mask_token),
    }


def sliding_fields(config: Any) -> dict[str, Any]:
    """Return the keys of sliding layers of an EAGLE3 head, which vLLM counts from its first layer
    (`target_layer_count`, servers §1.3); none if its layers see all keys.
    """
    if config.sliding_window is None:
        return {}
    types = ["sliding_attention"] * config.num_layers
    return {"layer_types": types, "sliding_window": config.sliding_window}


def eagle_native_config(config: HeadConfig, dtype: str) -> dict[str, Any]:
    """Return config.json of an EAGLE head, vLLM's EagleLlamaForCausalLM (servers §1.1)."""
    layers = layer_fields(config, dtype)
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **layers}


def eagle_llama4_native_config(config: Any, dtype: str) -> dict[str, Any]:
    """Return config.json of a dense Llama 4 drafter.

    With method eagle vLLM loads it as EagleLlama4ForCausalLM (servers §1.2). `no_rope_layers`
    covers the head's layers only: vLLM prepends the target's layers itself. The keys of experts and
    of shared caches must be written, since vLLM has no defaults and transformers has other ones.
    """
    return {
        "architectures": ["Llama4ForCausalLM"],
        "model_type": "llama4_text",
        **layer_fields(config, dtype),
        **config.llama4.model_dump(mode="json"),
        "intermediate_size_mlp": config.intermediate_size,
        "moe_layers": [],
        "interleave_moe_layer_step": 0,
        "yoco_global_kv_layer": None,
        "yoco_local_kv_layer": None,
    }


def dflash_native_config(config: Any, dtype: str) -> dict[str, Any]:
    """Return config.json of a DFlash head, which vLLM, SGLang and llama.cpp read (servers §12)."""
    fields = _block_fields(config, dtype)
    names = ("mask_token_id", "target_layer_ids", "block_size")
    nested = {name: fields[name] for name in names} | {"causal": config.is_causal}
    return fields | {"architectures": ["DFlashDraftModel"], "dflash_config": nested}


def dflash2_native_config(config: Any, dtype: str) -> dict[str, Any]:
    """Return config.json of a DFlash2 head (servers §12). Programs read its own keys in
    `dflash_config` alone; of the last three, those that change nothing are left out.
    """
    fields = dflash_native_config(config, dtype)
    own = {name: getattr(config, name) for name in SELECTOR_KEYS}
    factors = {name: getattr(config, field) for name, field in FACTOR_KEYS.items()}
    own |= {name: value for name, value in factors.items() if value not in (1.0, None)}
    nested = fields["dflash_config"] | own
    return fields | {"architectures": ["DFlash2DraftModel"], "dflash_config": nested}


def dspark_native_config(config: Any, dtype: str) -> dict[str, Any]:
    """Return config.json of a DSpark head, which vLLM, SGLang and llama.cpp read (servers §12)."""
    return _block_fields(config, dtype) | {
        "architectures": ["Qwen3DSparkModel"],
        "markov_rank": config.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": config.confidence,
        "confidence_head_with_markov": config.confidence,
    }


def _block_fields(config: Any, dtype: str) -> dict[str, Any]:
    """Return the keys that DFlash and DSpark share. Layer ids name outputs, not inputs."""
    fields = layer_fields(config, dtype)
    for name in ("bias", "mlp_bias", "target_hidden_size"):
        del fields[name]
    if config.draft_vocab_size == config.vocab_size:
        del fields["draft_vocab_size"]
    return fields | {
        "model_type": "qwen3",
        "torch_dtype": dtype,
        "attention_dropout": 0.0,
        "layer_types": [
            "full_attention" if window is None else "sliding_attention" for window in config.windows
        ],
        "use_sliding_window": any(config.windows),
        "sliding_window": config.sliding_window if any(config.windows) else None,
        "is_causal": config.is_causal,
        "num_target_layers": config.target_num_layers,
        "target_layer_ids": [b - 1 for b in config.boundaries],
        "mask_token_id": config.mask_token_id,
        "block_size": config.block_size,
        "sample_from_anchor": config.sample_from_anchor,
    }


def layer_fields(config: HeadConfig, dtype: str) -> dict[str, Any]:
    """Return the keys of the layers' shapes, with RoPE in the spelling of transformers 4 and 5."""
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
