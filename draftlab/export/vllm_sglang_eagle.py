"""First-generation EAGLE heads as vLLM and SGLang read them (servers §1.1, §6, §7).

Both programs use the target's embeddings and lm_head, and no norm. SGLang's fc has a bias, which
is initialised at random if it is missing; vLLM's has none, and refuses one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from draftlab.export.launch_text import sglang_text
from draftlab.export.layout import Export, check_width
from draftlab.export.vllm_sglang import HeadFolderLayout, refuse_own_embeddings


class VllmEagle(HeadFolderLayout):
    """vLLM's layout."""

    def title(self) -> str:
        return "vLLM layout (`LlamaForCausalLM`, served with method eagle)"

    def check(self, export: Export) -> None:
        check_width(export, "vLLM's")


class SglangEagle(VllmEagle):
    """SGLang's layout: another architecture name, and a bias of zeros."""

    def title(self) -> str:
        return "SGLang layout (`LlamaForCausalLMEagle`)"

    def check(self, export: Export) -> None:
        check_width(export, "SGLang's")
        refuse_own_embeddings(export.head)

    def config(self, export: Export) -> dict[str, Any]:
        return super().config(export) | {"architectures": ["LlamaForCausalLMEagle"]}

    def tensors(self, tensors: dict[str, Tensor], export: Export) -> dict[str, Tensor]:
        weight = tensors["fc.weight"]
        return tensors | {"fc.bias": weight.new_zeros(len(weight))}

    def launch(self, export: Export, path: Path) -> str:
        return sglang_text(export, path, algorithm="EAGLE")
