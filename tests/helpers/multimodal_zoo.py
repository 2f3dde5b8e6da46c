"""Tiny random checkpoints of multimodal models, as transformers' own `save_pretrained` writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from draftlab.pipeline.rehearsal import stand_in_config
from draftlab.target_model.loading import quiet_transformers

KINDS = (
    "aria", "deepseek_vl", "exaone4_5", "fuyu", "gemma3", "glm4v", "glm4v_moe", "got_ocr2",
    "idefics2", "idefics3", "internvl", "janus", "lfm2_vl", "llama4", "llava", "llava_next",
    "llava_onevision", "minimax_m3_vl", "mistral3", "ovis2", "paddleocr_vl",
    "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "smolvlm",
    "video_llava", "vipllava",
)  # fmt: skip
"""Types with a text model that draftlab uses."""
LENGTHS = ("num_hidden_layers", "depth", "num_layers", "encoder_layers")
WITH_SECTIONS = ("glm4v", "glm4v_moe", "paddleocr_vl", "qwen2_5_vl", "qwen2_vl")
"""Types whose default config lacks the `mrope_section` that their checkpoints have."""


def multimodal_folder(path: Path, kind: str, *, vocab_size: int = 300, **ids: int) -> Path:
    """Save a random float32 model with four text layers.

    Args:
        ids: token ids of the text model, such as eos_token_id.
    """
    config = CONFIG_MAPPING[kind]()
    fields = _short(config.to_dict(), vocab_size)
    text = fields.get("text_config") or fields
    text |= ids
    if kind in WITH_SECTIONS:
        rope = text.get("rope_parameters") or {"rope_type": "default", "rope_theta": 1e4}
        text["rope_parameters"] = rope | {"mrope_section": [16, 24, 24]}
    small = stand_in_config(type(config).from_dict(fields))
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        torch.manual_seed(0)
        AutoModelForImageTextToText.from_config(small).float().save_pretrained(path)
    return path


def _short(fields: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """Return the fields of a config with few layers and a small vocabulary."""
    for key, value in fields.items():
        if isinstance(value, dict):
            _short(value, vocab_size)
        elif key in LENGTHS and isinstance(value, int):
            fields[key] = min(value, 4)
        elif key in ("layer_types", "mlp_layer_types") and value:
            fields[key] = value[:4]
        elif key == "vocab_size":
            fields[key] = vocab_size
        elif str(key).endswith("_token_id") and isinstance(value, int):
            fields[key] = min(value, vocab_size - 1)
    return fields
