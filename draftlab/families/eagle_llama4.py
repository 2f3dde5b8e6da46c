"""The dense EAGLE drafter for Llama 4 targets (methods §3, servers §1.2)."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from draftlab.families.eagle import Eagle

if TYPE_CHECKING:
    from draftlab.export.foreign_config import ForeignConfig


class EagleLlama4(Eagle):
    """EAGLE heads with Llama 4's layers and a final norm of their own."""

    name = "eagle_llama4"
    config_type = "draftlab.heads.llama4:EagleLlama4Config"
    head_type = "draftlab.heads.llama4:EagleLlama4Head"
    native_type = "draftlab.heads.vllm_config:eagle_llama4_native_config"
    layouts_type = "draftlab.export.layout_table:eagle_llama4_layouts"
    title = "dense Llama 4"
    description = "dense Llama 4 EAGLE draft head"
    options = frozenset({"llama4"})
    rotates_pairs = True
    # Llama 4's `intermediate_size` is that of an expert.
    intermediate_size_names = ("intermediate_size_mlp", "intermediate_size")
    architectures = ()  # dense Llama 4 drafters of other programs are not read

    def config_fields(self, settings: Any, target: Any) -> dict[str, Any]:
        """Return the attention of the target, else of Llama 4 itself, with the recipe's RoPE."""
        from transformers import Llama4TextConfig

        from draftlab.heads.llama4 import Llama4Config

        default = Llama4TextConfig(num_hidden_layers=settings.num_layers)
        names = Llama4Config.model_fields.keys() - {"no_rope_layers"}
        fields = {name: getattr(target, name, getattr(default, name)) for name in names}
        fields["no_rope_layers"] = settings.llama4.no_rope_layers or default.no_rope_layers
        fields["attention_chunk_size"] = fields["attention_chunk_size"] or None
        return {"llama4": Llama4Config(**fields)}

    def reads(self, architecture: str, config: ForeignConfig, tensors: Collection[str]) -> bool:
        return False
