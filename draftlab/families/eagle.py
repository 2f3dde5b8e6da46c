"""EAGLE, the first generation: a chain that imitates the target's last state
(arXiv 2401.15077; methods §3, servers §1.1)."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from draftlab.heads.family import Family

if TYPE_CHECKING:
    from draftlab.export.foreign_config import ForeignConfig
    from draftlab.train.objectives.objective import Objective


class Eagle(Family):
    """EAGLE heads of the first generation, which draft with their target's lm_head."""

    name = "eagle"
    config_type = "draftlab.heads.eagle:EagleConfig"
    head_type = "draftlab.heads.eagle:EagleHead"
    drafter_type = "draftlab.engine.drafter:ChainDrafter"
    native_type = "draftlab.heads.vllm_config:eagle_native_config"
    layouts_type = "draftlab.export.layout_table:eagle_layouts"
    title = "first-generation EAGLE"
    description = "EAGLE draft head of the first generation"
    reads_last_state = True
    uses_target_lm_head = True
    whole_vocabulary = True
    architectures = ("EagleLlamaForCausalLM", "LlamaForCausalLMEagle", "LlamaForCausalLM")
    vllm_method = "eagle"

    def objective(self) -> Objective:
        from draftlab.train.objectives.objective import Objective
        from draftlab.train.objectives.ttt import ttt_weights, unroll

        return Objective(unroll, ttt_weights, imitates_states=True)

    def reads(self, architecture: str, config: ForeignConfig, tensors: Collection[str]) -> bool:
        if config.names_mask_token or architecture not in self.architectures:
            return False
        return architecture != "LlamaForCausalLM" or not any("hidden_norm" in n for n in tensors)
