"""Tiny random targets of several architectures, on disk."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ZOO = {
    "llama": {"tie_word_embeddings": False},
    # Norms on queries and keys, tied.
    "qwen3": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 8},
    # Windows on every second layer, sinks in the softmax, experts.
    "gpt_oss": {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    # Windows, capped scores and logits, scaled embeddings, four norms a layer.
    "gemma2": {
        "sliding_window": 8,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 10.0,
        "query_pre_attn_scalar": 8,
    },
    # Scales its logits, embeddings and residuals.
    "granite": {
        "logits_scaling": 4.0,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.3,
    },
}


def zoo_config(kind: str, **changes: object) -> PreTrainedConfig:
    """The config of an architecture in small."""
    return CONFIG_MAPPING[kind](**(SHAPE | ZOO[kind] | changes))


def zoo_folder(
    path: Path, kind: str, *, shard: str = "1GB", seed: int = 0, **changes: object
) -> Path:
    """Saves a random float32 target; norms and sinks differ from their plain initial values."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(zoo_config(kind, **changes)).float()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.3 * torch.randn_like(parameter))
                if name.endswith("sinks"):
                    parameter.copy_(torch.randn_like(parameter) + 1)
    model.save_pretrained(path, max_shard_size=shard)
    return path


def eager_model(folder: Path) -> torch.nn.Module:
    """transformers' own reading of a checkpoint, with the attention it writes out."""
    return AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype="float32"
    ).eval()
