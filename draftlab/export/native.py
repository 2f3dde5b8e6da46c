"""vLLM's native layout and SGLang's, which share an architecture and differ in what they read.

Both are `LlamaForCausalLMEagle3` with the head's tensors (servers §1.3, §6, §7). A head of one
layer is written as `midlayer.*`, which every version of every reader knows; `layers.0.*` is newer.
Embeddings are left out where they are the target's: either program shares those then.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from draftlab.errors import UserError
from draftlab.export.launch_text import sglang_text, vllm_text
from draftlab.export.layout import Export, Layout, check_width
from draftlab.heads.config import HeadConfig
from draftlab.heads.native_config import native_config

MIDLAYER, LAYER = "midlayer.", "layers.0."


class Native(Layout):
    """What programs that read `LlamaForCausalLMEagle3` share."""

    program = ""

    def title(self) -> str:
        return f"{self.program} layout"

    def check(self, export: Export) -> None:
        check_width(export, f"{self.program}'s")

    def config(self, export: Export) -> dict[str, Any]:
        """That of the head's own folder, with the positions of its target (servers §1.0)."""
        head = export.head.model_copy(update={"max_position_embeddings": export.positions})
        return native_config(head, export.dtype_name)

    def tensors(self, tensors: dict[str, Tensor], export: Export) -> dict[str, Tensor]:
        if export.head.num_layers > 1:
            return tensors
        return {
            MIDLAYER + name.removeprefix(LAYER) if name.startswith(LAYER) else name: tensor
            for name, tensor in tensors.items()
        }


class Vllm(Native):
    """vLLM's own layout, for EAGLE3 and for parallel heads."""

    program = "vLLM"

    def launch(self, export: Export, place: Path) -> str:
        return vllm_text(export, place)


class Sglang(Native):
    """SGLang's. It counts layers by their outputs, and reads no `norm_before_residual`."""

    program = "SGLang"

    def check(self, export: Export) -> None:
        super().check(export)
        head, last = export.head, export.head.target_num_layers
        refuse_flags(
            head,
            {
                "qk_norm": "its EAGLE3 layer has no norms of queries and keys",
                "norm_before_residual": "it does not read the flag, and would draft wrong in "
                "silence",
            },
            "SGLang",
        )
        refuse_own_embeddings(head)
        if head.boundaries[0] == 0:
            raise UserError(
                "SGLang cannot hand over boundary 0, the embeddings: it counts outputs of layers",
                do="use --to vllm",
            )
        if head.boundaries[-1] == last and not _is_gpt_oss(export):
            raise UserError(
                f"SGLang hands over boundary {last}, the state behind the last layer, only of "
                "gpt-oss targets",
                do="use --to vllm",
            )
        if head.feature_size == head.hidden_size:
            raise UserError(
                "SGLang leaves out fc where its input is as wide as its output, as with this one "
                "boundary",
                do="use --to vllm",
            )

    def config(self, export: Export) -> dict[str, Any]:
        config = super().config(export)
        if _is_gpt_oss(export) and export.head.boundaries[-1] == export.head.target_num_layers:
            # There, and there alone, ids that name the last boundary are taken as boundaries.
            ids = list(export.head.boundaries)
            nested = {**config["eagle_config"], "eagle_aux_hidden_state_layer_ids": ids}
            return config | {"eagle_config": nested}
        return config

    def launch(self, export: Export, place: Path) -> str:
        return sglang_text(export, place)


def refuse_flags(head: HeadConfig, reasons: dict[str, str], program: str) -> None:
    """Refuses a head with one of the flags that a program has no place for.

    Args:
        reasons: flag of draftlab.json → why a program cannot serve it.

    Raises:
        UserError: naming the flag, the reason, and vLLM's layout.
    """
    for flag, reason in reasons.items():
        if getattr(head, flag, False):
            raise UserError(
                f"{program} cannot hold a head with {flag}: {reason}", do="use --to vllm"
            )


def refuse_own_embeddings(head: HeadConfig) -> None:
    """Refuses what SGLang would replace by the target's: embeddings of the target's width.

    Raises:
        UserError: the head was trained with embeddings of its own.
    """
    if head.embeddings == "own" and head.hidden_size == head.target_hidden_size:
        raise UserError(
            "SGLang cannot hold a head with embeddings of its own: it puts the target's in their "
            "place, and would draft wrong in silence",
            do="use --to vllm",
        )


def _is_gpt_oss(export: Export) -> bool:
    return export.target.get("model_type") == "gpt_oss"
