"""EAGLE3: a chain that reads auxiliary hidden states (arXiv 2503.01840; methods §2, servers
§1.3)."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from draftlab.heads.family import Family

if TYPE_CHECKING:
    from draftlab.export.foreign_config import ForeignConfig
    from draftlab.train.objectives.objective import Objective


class Eagle3(Family):
    """EAGLE3 heads draft one token a pass, each from the head's previous output."""

    name = "eagle3"
    config_type = "draftlab.heads.eagle3:Eagle3Config"
    head_type = "draftlab.heads.eagle3:Eagle3Head"
    drafter_type = "draftlab.engine.drafter:ChainDrafter"
    native_type = "draftlab.heads.vllm_config:eagle3_native_config"
    layouts_type = "draftlab.export.layout_table:eagle3_layouts"
    title = "EAGLE3"
    description = "EAGLE3 draft head (a chain: one draft token a pass)"
    options = frozenset(
        {
            "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "qk_norm",
            "sliding_window",
        }
    )  # fmt: skip
    norms_residual = True
    starts_from = frozenset({"peagle"})
    architectures = (
        "LlamaForCausalLMEagle3",
        "Eagle3LlamaForCausalLM",
        "Eagle3Qwen3ForCausalLM",
        "LlamaForCausalLM",
    )
    speculators_type = "eagle3"
    norm_flag_must_be_named = True
    vllm_method = "eagle3"

    def objective(self) -> Objective:
        from draftlab.train.fast.ttt import FastUnroll
        from draftlab.train.objectives.objective import Objective
        from draftlab.train.objectives.ttt import ttt_weights, unroll

        return Objective(unroll, ttt_weights, fast_forward=FastUnroll)

    def foreign_fields(self, config: ForeignConfig, layout: str) -> dict[str, Any]:
        if not config.slides:
            return {}
        if {*(config.layer_types or ())} != {"sliding_attention"} or config.sliding_window is None:
            raise ValueError(
                "expected layers that all slide, with a sliding_window, or none; found layer_types "
                f"{config.layer_types} and sliding_window {config.sliding_window}"
            )
        return {"sliding_window": config.sliding_window}

    def reads(self, architecture: str, config: ForeignConfig, tensors: Collection[str]) -> bool:
        if config.names_mask_token or architecture not in self.architectures:
            return False
        # SafeAILab calls heads of both generations LlamaForCausalLM; only EAGLE3's have this norm.
        return architecture != "LlamaForCausalLM" or any("hidden_norm" in n for n in tensors)
