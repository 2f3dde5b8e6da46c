"""Tiny random checkpoints of any type, as transformers' own `save_pretrained` writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from draftlab.target_model.auto_model import auto_class
from draftlab.target_model.loading import quiet_transformers
from draftlab.target_model.stand_in import stand_in_config

KINDS = (
    "aria", "deepseek_vl", "deepseek_vl_hybrid", "exaone4_5", "fuyu", "gemma3", "glm4v",
    "glm4v_moe", "got_ocr2", "idefics2", "idefics3", "internvl", "janus", "lfm2_vl", "llama4",
    "llava", "llava_next", "llava_onevision", "minimax_m3_vl", "mistral3", "ovis2", "paddleocr_vl",
    "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "smolvlm",
    "video_llava", "vipllava",
)  # fmt: skip
"""Types with a text model that draftlab uses."""
WITH_SECTIONS = (
    "glm46v", "glm4v", "glm4v_moe", "glm_ocr", "glmga", "paddleocr_vl", "qwen2_5_vl", "qwen2_vl",
)  # fmt: skip
"""Types whose default config lacks the `mrope_section` that their checkpoints have."""

_GEMMA_4: dict[str, Any] = {"per_layer_config": {"3": {"head_dim": 32}}}
FIELDS: dict[str, dict[str, Any]] = {
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "gemma4": _GEMMA_4,
    "gemma4_text": _GEMMA_4,
}
"""Fields of the text model that a default config lacks, or has for other layers."""


def random_folder(path: Path, kind: str, *, vocab_size: int = 300, **ids: int) -> Path:
    """Save a random float32 model of the default config of a type, with four text layers.

    Args:
        kind: a type of causal language models or of multimodal models, which are saved whole.
        ids: token ids of the text model, such as eos_token_id.
    """
    config = CONFIG_MAPPING[kind]()
    fields = config.to_dict()
    text = fields.get("text_config") or fields
    text |= FIELDS.get(kind, {}) | ids | {"vocab_size": vocab_size}
    if kind in WITH_SECTIONS:
        rope = text.get("rope_parameters") or {"rope_type": "default", "rope_theta": 1e4}
        text["rope_parameters"] = rope | {"mrope_section": [16, 24, 24]}
    small = stand_in_config(type(config).from_dict(fields), layers=4, vocab_size=vocab_size)
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        torch.manual_seed(0)
        auto_class(small, whole=True).from_config(small).float().save_pretrained(path)
    return path
