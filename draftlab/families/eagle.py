"""EAGLE, the first generation: a chain that imitates the target's last state
(arXiv 2401.15077; methods §3, servers §1.1)."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from draftlab.heads.family import Family

if TYPE_CHECKING:
    from draftlab.engine.drafter import HeadDrafter
    from draftlab.export.foreign_config import ForeignConfig
    from draftlab.export.layout import Layout
    from draftlab.heads.config import HeadConfig
    from draftlab.heads.head import DraftHead
    from draftlab.train.objectives.objective import Objective


class Eagle(Family):
    """EAGLE heads of the first generation, which draft with their target's lm_head."""

    name = "eagle"
    title = "first-generation EAGLE"
    description = "EAGLE draft head of the first generation"
    reads_last_state = True
    uses_target_lm_head = True
    architectures = ("EagleLlamaForCausalLM", "LlamaForCausalLMEagle", "LlamaForCausalLM")
    vllm_method = "eagle"

    def config_class(self) -> type[HeadConfig]:
        from draftlab.heads.eagle import EagleConfig

        return EagleConfig

    def new_head(self, config: HeadConfig) -> DraftHead:
        from draftlab.heads.eagle import EagleHead

        return EagleHead(config)

    def objective(self) -> Objective:
        from draftlab.train.objectives.objective import Objective
        from draftlab.train.objectives.ttt import ttt_weights, unroll

        return Objective(unroll, ttt_weights, imitates_states=True)

    def new_drafter(self, head: DraftHead, k: int, **options: Any) -> HeadDrafter:
        from draftlab.engine.drafter import ChainDrafter

        return ChainDrafter(head, k, **options)

    def layouts(self) -> dict[str, Layout | str]:
        from draftlab.export.vllm_sglang import SglangEagle, VllmEagle

        return {
            "speculators": "vLLM reads speculators' eagle3 and peagle, not its eagle: use "
            "--to vllm",
            "vllm": VllmEagle(),
            "sglang": SglangEagle(),
            "llamacpp": "llama.cpp has no first-generation EAGLE: vLLM serves this head "
            "(--to vllm)",
        }

    def native_config(self, config: HeadConfig, dtype: str) -> dict[str, Any]:
        from draftlab.heads.vllm_config import eagle_native_config

        return eagle_native_config(config, dtype)

    def reads(self, architecture: str, config: ForeignConfig, tensors: Collection[str]) -> bool:
        if config.names_mask_token or architecture not in self.architectures:
            return False
        return architecture != "LlamaForCausalLM" or not any("hidden_norm" in n for n in tensors)
