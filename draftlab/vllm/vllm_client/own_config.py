"""What vLLM must be told to compute a target as its config.json says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TUNING = "attn_temperature_tuning"


def generation_override(config: dict[str, Any]) -> dict[str, Any]:
    """What vLLM's `override_generation_config` must say of a target with this config.json.

    vLLM (models/llama4.py) does not ask Llama 4's config whether attention is tempered: it is where
    more than 32,768 positions are served, or where the generation config says so. Elsewhere all
    tokens from position `floor_scale` − 1 on are computed otherwise than the target was trained.
    """
    text = config.get("text_config", config)
    if text.get("model_type") not in ("llama4", "llama4_text"):
        return {}
    return {TUNING: bool(text.get(TUNING, True))}


def engine_options(folder: str | Path) -> dict[str, Any]:
    """The same as options of LLM(), for the target in a folder."""
    override = generation_override(json.loads((Path(folder) / "config.json").read_text()))
    return {"override_generation_config": override} if override else {}
