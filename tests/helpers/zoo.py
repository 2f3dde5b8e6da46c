"""A zoo of tiny random targets: one for each supported architecture, saved to disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from draftlab.target_model.loading import load_target
from draftlab.target_model.model import Target
from draftlab.target_model.parts import text_decoder
from draftlab.target_model.settings import TargetSettings
from tests.helpers.hybrid_zoo import HYBRID
from tests.helpers.toys import toy_tokenizer

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
# Keys and values of all heads are compressed to one latent, which the cache holds.
_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 4,
    "num_key_value_heads": 4,
}
_LATENT_MIXTURE = _LATENT | {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
ZOO = {
    "llama": {"tie_word_embeddings": False},
    "deepseek_v3": _LATENT_MIXTURE,
    "deepseek_v2": _LATENT_MIXTURE,
    "glm4_moe_lite": _LATENT_MIXTURE,
    "minicpm3": _LATENT,
    "youtu": _LATENT,
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
    # Chunked attention with RoPE, full attention without it and with a temperature that steps every
    # 16 positions; experts on every second layer, norms without weights on queries and keys.
    "llama4_text": {
        "no_rope_layers": [1, 0, 1, 0],
        "attention_chunk_size": 8,
        "floor_scale": 16,
        "attn_scale": 0.5,
        "use_qk_norm": True,
        "interleave_moe_layer_step": 2,
        "num_local_experts": 4,
        "intermediate_size_mlp": 40,
    },
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "mixtral": {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    # A dense layer, then routed and shared experts, selected by biased sigmoids.
    "glm4_moe": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    # One product for queries, keys and values; two sets of frequencies.
    "phi3": {
        "original_max_position_embeddings": 96,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0, 1.5, 2.0, 3.0],
            "long_factor": [2.0, 4.0, 6.0, 8.0],
            "original_max_position_embeddings": 96,
        },
    },
    # Attention beside the feed-forward, windows with RoPE, full attention without, scaled logits.
    "cohere2": {
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "logit_scale": 0.5,
    },
    # Two sets of RoPE frequencies, by layer.
    "gemma3_text": {
        "sliding_window": 8,
        "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    # A temperature on every layer, from position_ids.
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.5,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    # Every fourth layer without RoPE.
    "smollm3": {"no_rope_layers": [1, 1, 1, 0]},
    # Norms after each block, over whole queries and keys; windows.
    "olmo3": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2},
}
# Fields of a vision tower beside a text model of the zoo.
VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 16,
    "patch_size": 8,
    "projector_input_dim": 16,
    "projector_output_dim": 16,
    "vision_output_dim": 16,
}
MULTIMODAL = {"llama4": "llama4_text"}
ZOO |= {kind: ZOO[text] for kind, text in MULTIMODAL.items()}
# Sizes of real checkpoints, which GPU kernels support, for `zoo_config(kind, **wide(kind))`.
WIDE: dict[str, object] = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.08,
}
_FACTORS = [1.0 + i / 16 for i in range(32)]  # one for each frequency
_WIDE_LATENT: dict[str, object] = {
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
}
_WIDE: dict[str, dict[str, object]] = {
    **dict.fromkeys(
        ("deepseek_v3", "deepseek_v2", "glm4_moe_lite", "minicpm3", "youtu"), _WIDE_LATENT
    ),
    "mistral": {"sliding_window": 24},
    "qwen3": {"head_dim": 128},
    "gpt_oss": {"sliding_window": 24, "num_local_experts": 8},
    "gemma2": {"sliding_window": 24, "head_dim": 128, "query_pre_attn_scalar": 128},
    "granite": {"attention_multiplier": 0.125},
    "llama4_text": {"attention_chunk_size": 16, "intermediate_size_mlp": 384},
    "qwen3_moe": {"head_dim": 128, "moe_intermediate_size": 128},
    "mixtral": {"sliding_window": 24},
    "glm4_moe": {"moe_intermediate_size": 128},
    "phi3": {
        "original_max_position_embeddings": 256,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": _FACTORS,
            "long_factor": [2 * factor for factor in _FACTORS],
            "original_max_position_embeddings": 256,
        },
    },
    "cohere2": {"sliding_window": 24},
    "gemma3_text": {"sliding_window": 24, "head_dim": 128, "query_pre_attn_scalar": 128},
    "olmo3": {"sliding_window": 24},
}


def wide(kind: str) -> dict[str, object]:
    """Return the fields of an architecture that differ for `WIDE` sizes."""
    return WIDE | _WIDE.get(MULTIMODAL.get(kind, kind), {})


# Architectures whose experts use transformers' interface, so that draftlab can replace them.
MIXTURES = ("gpt_oss", "qwen3_moe", "mixtral", "glm4_moe")


# Architectures that are refused in part, with the fields that make them small.
WITHOUT_PAGES: list[tuple[str, dict[str, Any]]] = [
    ("jetmoe", {"num_local_experts": 4, "kv_channels": 8}),  # it attends in its own code
]


def zoo_config(kind: str, **changes: object) -> PreTrainedConfig:
    """Return the small config of an architecture."""
    fields = SHAPE | ZOO.get(kind, {}) | HYBRID.get(kind, {}) | changes
    if kind in MULTIMODAL:
        return CONFIG_MAPPING[kind](text_config=fields, vision_config=VISION)
    return CONFIG_MAPPING[kind](**fields)


def zoo_folder(
    path: Path, kind: str, *, shard: str = "1GB", seed: int = 0, **changes: object
) -> Path:
    """Save a random float32 target; norms and sinks differ from their initial values."""
    auto = AutoModelForImageTextToText if kind in MULTIMODAL else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto.from_config(zoo_config(kind, **changes)).float()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.3 * torch.randn_like(parameter))
                if name.endswith("sinks"):
                    parameter.copy_(torch.randn_like(parameter) + 1)
    model.save_pretrained(path, max_shard_size=shard)
    return path


def zoo_folder_with_tokenizer(
    path: Path, kind: str, *, unused_rows: int = 64, **changes: Any
) -> Path:
    """Save a random target with the toy tokenizer, which leaves rows of its embeddings unused."""
    tokenizer = toy_tokenizer()
    ids = {f"{n}_token_id": getattr(tokenizer, f"{n}_token_id") for n in ("bos", "eos", "pad")}
    vocab_size = len(tokenizer) + unused_rows
    zoo_folder(path, kind, vocab_size=vocab_size, max_position_embeddings=512, **changes, **ids)
    tokenizer.save_pretrained(path)
    return path


def load_on_cpu(folder: Path, **settings: Any) -> Target:
    """Load a target on the CPU."""
    return load_target(TargetSettings(path=str(folder), **({"device": "cpu"} | settings)))


def zoo_target(path: Path, kind: str, *, dtype: Any = "auto", **changes: object) -> Target:
    """Save a random target of the zoo and load it on the CPU."""
    return load_on_cpu(zoo_folder(path, kind, **changes), dtype=dtype)


def eager_model(folder: Path) -> torch.nn.Module:
    """Load a checkpoint with transformers' eager attention and experts; multimodal ones whole."""
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    return (
        getattr(transformers, name)
        .from_pretrained(
            folder, attn_implementation="eager", experts_implementation="eager", dtype="float32"
        )
        .eval()
    )


class _ChangedLayer(nn.Module):
    """A decoder layer whose output is changed by a function of the output and the inputs."""

    def __init__(self, layer: nn.Module, change: Callable[[Tensor, dict], Tensor]) -> None:
        super().__init__()
        self.layer, self.change = layer, change

    def forward(self, hidden_states: Tensor, **inputs: Any) -> Tensor:
        return self.change(self.layer(hidden_states, **inputs), inputs)


def change_layer(target: Target, change: Callable[[Tensor, dict], Tensor]) -> None:
    """Change the outputs of a layer, as faulty code of a checkpoint would."""
    layers = text_decoder(target.model)[1]
    layers[1] = _ChangedLayer(layers[1], change)


def random_texts(lengths: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    """Return random texts of the zoo's vocabulary, int64 [length] each."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, SHAPE["vocab_size"], (n,), generator=generator) for n in lengths]


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    """Assert equality within `tolerance` of the largest expected value."""
    assert actual.shape == expected.shape
    scale = float(expected.abs().amax()) if expected.numel() else 1.0
    torch.testing.assert_close(actual / scale, expected / scale, rtol=0, atol=tolerance)
