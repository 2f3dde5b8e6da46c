"""vLLM's layout of the dense Llama 4 drafter, which it loads as EagleLlama4ForCausalLM.

The head folder is in this layout already (servers §1.2): Llama 4's names, RoPE on neighbouring
pairs, a config.json with the keys that have no default there. The export adds the target's
embeddings, since older versions require a checkpoint to hold every tensor.
"""

from __future__ import annotations

from draftlab.export.vllm_sglang import HeadFolderLayout


class VllmLlama4(HeadFolderLayout):
    """vLLM's layout, served with method eagle."""

    ships_embeddings = True

    def title(self) -> str:
        return "vLLM layout (`Llama4ForCausalLM`, served as `EagleLlama4ForCausalLM`)"
