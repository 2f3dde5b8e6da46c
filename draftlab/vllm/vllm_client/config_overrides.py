"""Options that make vLLM compute a target as its config.json says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TUNING = "attn_temperature_tuning"


def generation_override(config: dict[str, Any]) -> dict[str, Any]:
    """Return vLLM's `override_generation_config` for a target with this config.json.

    vLLM (models/llama4.py) ignores the attention temperature setting of Llama 4's config. It
    applies it if more than 32,768 positions are served, or if the generation config says so. In the
    other cases all tokens from position `floor_scale` − 1 on would differ from the training.
    """
    text = config.get("text_config", config)
    if text.get("model_type") not in ("llama4", "llama4_text"):
        return {}
    return {TUNING: bool(text.get(TUNING, True))}


def engine_options(folder: str | Path) -> dict[str, Any]:
    """Return the override as options of LLM(), for the target in a folder."""
    override = generation_override(json.loads((Path(folder) / "config.json").read_text()))
    return {"override_generation_config": override} if override else {}
