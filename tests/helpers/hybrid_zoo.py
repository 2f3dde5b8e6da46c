"""Fields of small targets with recurrent layers beside attention, for `zoo_config`."""

from __future__ import annotations

from typing import Any

_DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
}
_MAMBA_2 = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
HYBRID: dict[str, dict[str, Any]] = {
    "qwen3_next": _DELTA_NET
    | {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
    },
    "qwen3_5_text": _DELTA_NET,
    "olmo_hybrid": _DELTA_NET,
    # Layers of experts alone, and attention without RoPE.
    "nemotron_h": {
        "layers_block_type": ["mamba", "moe", "attention", "mamba"],
        "time_step_min": 1e-9,  # transformers limits time steps by it, in prompts alone
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 2,
        "conv_kernel": 4,
        "chunk_size": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 24,
    },
    # Attention and a state in every layer; scaled logits.
    "falcon_h1": _MAMBA_2 | {"mamba_d_ssm": 32, "mamba_d_head": 8, "lm_head_multiplier": 0.5},
    "granitemoehybrid": _MAMBA_2
    | {
        "layer_types": ["mamba", "attention", "mamba", "attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 24,
    },
    "bamba": _MAMBA_2 | {"attn_layer_indices": [1, 3]},
    # Short convolutions, without a recurrent sum.
    "lfm2": {
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        "conv_L_cache": 3,
        "block_multiple_of": 8,
    },
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mamba_d_state": 8,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
}
