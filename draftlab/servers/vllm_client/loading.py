"""Loading of vLLM's engine, for decoding and for hidden states: its setup and its options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

INVALID_REQUEST, NO_VLLM = 2, 3  # exit statuses
SETUP: dict[str, Any] = {
    "target": None,  # folder of the target model (required)
    "draft": None,  # folder of the head, speculators or native format; None: no drafting
    "method": "eagle3",  # or another method of vLLM, which would otherwise guess
    "k": 0,  # drafted tokens per step
    "draft_probs": False,  # whether drafts are sampled and verified with the head's probabilities
    "parallel_drafting": False,  # True for P-EAGLE heads
    "dtype": "float32",
    "max_model_len": 1024,  # maximum number of positions of a request
    "max_num_seqs": 1,  # batch size; 1: one request after the other
    # Layers in ascending order (num_layers: the state before the final norm), whose inputs are
    # written instead of decoding, and the folder of those states, a safetensors file per prompt.
    "boundaries": None,
    "states_folder": None,
    # More options of vLLM's speculative_config and LLM().
    "speculative_extra": {},
    "engine_extra": {},
}
TUNING = "attn_temperature_tuning"


class RequestError(ValueError):
    """A setup or request that cannot be run; the message says what to change."""


def load_engine(setup: dict[str, Any], **options: Any) -> Any:
    """Return the LLM of a setup; `engine_extra` of the setup replaces `options`."""
    import vllm
    from vllm.platforms import current_platform

    defaults = {
        "enforce_eager": current_platform.is_cpu(),
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,  # requests and answers are token ids
        "generation_config": "vllm",  # do not use the model's own sampling defaults
    }
    config = json.loads((Path(setup["target"]) / "config.json").read_text())
    override = generation_override(config)
    corrected = {"override_generation_config": override} if override else {}
    return vllm.LLM(
        model=setup["target"],
        dtype=setup["dtype"],
        max_model_len=setup["max_model_len"],
        max_num_seqs=setup["max_num_seqs"],
        **defaults | options | corrected | setup["engine_extra"],
    )


def engine_info(llm: Any, corrections: list[str]) -> dict[str, Any]:
    """Return vLLM's version, model runner and device, and the corrections made to it."""
    import vllm
    from vllm.platforms import current_platform

    v2 = getattr(llm.llm_engine.vllm_config, "use_v2_model_runner", False)
    return {
        "version": vllm.__version__,
        "runner": "V2" if v2 else "V1",
        "device": current_platform.device_type,
        "corrections": corrections,
    }


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
