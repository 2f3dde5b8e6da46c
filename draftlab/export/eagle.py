"""First-generation EAGLE heads as vLLM and SGLang read them (servers §1.1, §6, §7).

Either takes embeddings and lm_head from the target, and no norm. Their one difference makes two
exports of it: SGLang's fc has a bias, which it would draw at random if it were missing; vLLM's has
none, and refuses one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from draftlab.export.launch_text import sglang_text, vllm_text
from draftlab.export.layout import Export, Layout, check_width
from draftlab.export.native import refuse_own_embeddings
from draftlab.heads.native_config import native_config


class VllmEagle(Layout):
    """vLLM's: the files of the head's own folder, with the target's positions."""

    def title(self) -> str:
        return "vLLM layout (`LlamaForCausalLM`, served with method eagle)"

    def check(self, export: Export) -> None:
        check_width(export, "vLLM's")

    def config(self, export: Export) -> dict[str, Any]:
        head = export.head.model_copy(update={"max_position_embeddings": export.positions})
        return native_config(head, export.dtype_name)

    def launch(self, export: Export, place: Path) -> str:
        return vllm_text(export, place)


class SglangEagle(VllmEagle):
    """SGLang's: another name, and a bias of zeros."""

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

    def launch(self, export: Export, place: Path) -> str:
        return sglang_text(export, place, algorithm="EAGLE")
