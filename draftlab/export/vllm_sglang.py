"""The native layouts of vLLM and SGLang (servers §1.1, §1.2, §1.3, §6, §7).

Heads of EAGLE3's kind are `LlamaForCausalLMEagle3` in both programs. A head of one layer is written
as `midlayer.*`, which every version of every program reads; `layers.0.*` is newer. Embeddings are
left out if they are the target's, since both programs share those then. With heads of EAGLE's first
generation both programs use the target's embeddings and lm_head, and no norm.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from draftlab.errors import UserError
from draftlab.export.launch_text import sglang_text, vllm_text
from draftlab.export.layout import Export, Layout, check_width
from draftlab.heads.config import HeadConfig
from draftlab.heads.vllm_config import native_config

MIDLAYER, LAYER = "midlayer.", "layers.0."


class HeadFolderLayout(Layout):
    """The files of the head folder itself, with the target's number of positions (servers §1.0)."""

    def config(self, export: Export) -> dict[str, Any]:
        head = export.head.model_copy(update={"max_position_embeddings": export.positions})
        return native_config(head, export.dtype_name)

    def launch(self, export: Export, path: Path) -> str:
        return vllm_text(export, path)


class Native(HeadFolderLayout):
    """The layout of programs that read `LlamaForCausalLMEagle3`."""

    program = ""

    @property
    def title(self) -> str:
        return f"{self.program} layout"

    def check(self, export: Export) -> None:
        check_width(export, f"{self.program}'s")

    def tensors(self, tensors: dict[str, Tensor], export: Export) -> dict[str, Tensor]:
        if export.head.num_layers > 1:
            return tensors
        return {
            MIDLAYER + name.removeprefix(LAYER) if name.startswith(LAYER) else name: tensor
            for name, tensor in tensors.items()
        }


class Vllm(Native):
    """vLLM's layout of EAGLE3 and parallel heads."""

    program = "vLLM"


class Sglang(Native):
    """SGLang's layout. SGLang counts outputs of layers and does not read `norm_before_residual`."""

    program = "SGLang"
    reads_norm_before_residual = False

    def check(self, export: Export) -> None:
        super().check(export)
        head, last = export.head, export.head.target_num_layers
        refuse_flags(
            head,
            {
                "qk_norm": "its EAGLE3 layer has no norms of queries and keys",
                "norm_before_residual": "it does not read the flag, and would draft wrong tokens "
                "without a warning",
            },
            "SGLang",
        )
        refuse_own_embeddings(head)
        if head.boundaries[0] == 0:
            raise UserError(
                "SGLang cannot extract boundary 0, the embeddings: it counts outputs of layers",
                do="use --to vllm",
            )
        if head.boundaries[-1] == last and not _is_gpt_oss(export):
            raise UserError(
                f"SGLang extracts boundary {last}, the state after the last layer, only from "
                "gpt-oss targets",
                do="use --to vllm",
            )
        if head.feature_size == head.hidden_size:
            raise UserError(
                "SGLang leaves out fc if its input is as wide as its output, as with this one "
                "boundary",
                do="use --to vllm",
            )

    def config(self, export: Export) -> dict[str, Any]:
        config = super().config(export)
        if _is_gpt_oss(export) and export.head.boundaries[-1] == export.head.target_num_layers:
            # Only for these targets SGLang reads ids that name the last boundary as boundaries.
            ids = list(export.head.boundaries)
            nested = {**config["eagle_config"], "eagle_aux_hidden_state_layer_ids": ids}
            return config | {"eagle_config": nested}
        return config

    def launch(self, export: Export, path: Path) -> str:
        return sglang_text(export, path)


class VllmEagle(HeadFolderLayout):
    """vLLM's layout of first-generation EAGLE heads."""

    title = "vLLM layout (`LlamaForCausalLM`, served with method eagle)"

    def check(self, export: Export) -> None:
        check_width(export, "vLLM's")


class SglangEagle(VllmEagle):
    """SGLang's layout of first-generation EAGLE heads.

    It has another architecture name. SGLang's fc has a bias, which is initialised at random if it
    is missing; vLLM's has none, and refuses one.
    """

    title = "SGLang layout (`LlamaForCausalLMEagle`)"

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


class VllmLlama4(HeadFolderLayout):
    """vLLM's layout of the dense Llama 4 drafter, which it loads as EagleLlama4ForCausalLM.

    The head folder is in this layout already: Llama 4's names, RoPE on neighbouring pairs, a
    config.json with the keys that have no default there. The export adds the target's embeddings,
    since older versions require a checkpoint to hold every tensor.
    """

    ships_embeddings = True

    title = "vLLM layout (`Llama4ForCausalLM`, served as `EagleLlama4ForCausalLM`)"


def refuse_flags(head: HeadConfig, reasons: dict[str, str], program: str) -> None:
    """Raise a `UserError` if a head has a flag that a program cannot serve.

    Args:
        reasons: flag of draftlab.json → why the program cannot serve it.
    """
    for flag, reason in reasons.items():
        if getattr(head, flag, False):
            raise UserError(
                f"{program} cannot serve a head with {flag}: {reason}", do="use --to vllm"
            )


def refuse_own_embeddings(head: HeadConfig) -> None:
    """Raise a `UserError` if SGLang would replace the head's embeddings by the target's."""
    if head.embeddings == "own" and head.hidden_size == head.target_hidden_size:
        raise UserError(
            "SGLang cannot serve a head with embeddings of its own: it replaces them by the "
            "target's, and would draft wrong tokens without a warning",
            do="use --to vllm",
        )


def _is_gpt_oss(export: Export) -> bool:
    return export.target.get("model_type") == "gpt_oss"
