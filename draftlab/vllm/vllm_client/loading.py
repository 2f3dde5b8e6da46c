"""Loading of vLLM's engine, for decoding and for hidden states."""

from __future__ import annotations

from typing import Any

from .config_overrides import engine_options


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
    return vllm.LLM(
        model=setup["target"],
        dtype=setup["dtype"],
        max_model_len=setup["max_model_len"],
        max_num_seqs=setup["max_num_seqs"],
        **defaults | options | engine_options(setup["target"]) | setup["engine_extra"],
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
