"""vLLM's layout of the dense Llama 4 drafter, which it loads as EagleLlama4ForCausalLM.

The head's files are in it already (servers §1.2): Llama 4's names, neighbouring pairs rotated,
a config.json with the keys that have no default there. The target's embeddings come too, since
older versions insist that a checkpoint fills every tensor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftlab.export.launch_text import vllm_text
from draftlab.export.layout import Export, Layout
from draftlab.heads.native_config import native_config


class VllmLlama4(Layout):
    """vLLM's, method eagle."""

    ships_embeddings = True

    def title(self) -> str:
        return "vLLM layout (`Llama4ForCausalLM`, served as `EagleLlama4ForCausalLM`)"

    def config(self, export: Export) -> dict[str, Any]:
        """That of the head's own folder, with the positions of its target (servers §1.0)."""
        head = export.head.model_copy(update={"max_position_embeddings": export.positions})
        return native_config(head, export.dtype_name)

    def launch(self, export: Export, place: Path) -> str:
        return vllm_text(export, place)
