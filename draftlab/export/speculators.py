"""The speculators layout (servers §9), which vLLM serves as it stands.

Tensor names are those of the head folder, so an export consists of the head's tensors, the target's
embeddings if the head has none, and a complete config.json: vLLM applies no defaults of a model, so
that a missing key means a different head without an error (servers §1.6).
"""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any

from torch import Tensor

from draftlab.errors import UserError
from draftlab.export.launch_text import vllm_text
from draftlab.export.layout import Export, Layout, check_width
from draftlab.export.native import USE_VLLM, bake_temperature, check_block
from draftlab.heads.config import HeadConfig
from draftlab.heads.family import get_family
from draftlab.heads.vllm_config import layer_fields, native_config
from draftlab.target_model.locate import is_hub_id

LAYOUT_VERSION = "0.9.0"
"""Version of the speculators library whose files this layout follows."""
MASK_HIDDEN = "mask_hidden"
# fmt: off
_OWN_BLOCK_KEYS = (
    "markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov",
    "mask_token_id", "block_size", "sample_from_anchor",
)
"""Keys of a native block config that stand at the top here."""
_NATIVE_BLOCK_KEYS = (
    "architectures", "dflash_config", "target_layer_ids", "num_target_layers", "torch_dtype",
    "dtype", "draft_vocab_size", "rope_scaling",
)
"""Keys of a native block config that this layout does not have."""
# fmt: on


class _LibraryLayout(Layout):
    """The files of one of the library's model types.

    Args:
        model_type: `speculators_model_type`.
        architecture: the library's class.
    """

    def __init__(self, model_type: str, architecture: str) -> None:
        self.model_type, self.architecture = model_type, architecture
        self.title = f"speculators layout {LAYOUT_VERSION} (`speculators_model_type: {model_type}`)"

    def config(self, export: Export) -> dict[str, Any]:
        """Return config.json; `own_fields` stand between the common ones."""
        return {
            "architectures": [self.architecture],
            "speculators_model_type": self.model_type,
            "speculators_version": LAYOUT_VERSION,
            "dtype": export.dtype_name,
            "tie_word_embeddings": False,
            "draft_vocab_size": export.head.draft_vocab_size,
            **self.own_fields(export),
            "speculators_config": _proposal_config(export, self.model_type),
            "transformer_layer_config": self.layer_config(export),
        }

    @abstractmethod
    def own_fields(self, export: Export) -> dict[str, Any]:
        """Return the keys of the model type."""

    @abstractmethod
    def layer_config(self, export: Export) -> dict[str, Any]:
        """Return the config of the decoder layers."""

    def launch(self, export: Export, path: Path) -> str:
        return vllm_text(export, path, alone=is_hub_id(export.target_name))


class Speculators(_LibraryLayout):
    """The library's layout of EAGLE3 and parallel heads."""

    ships_embeddings = True  # the library leaves missing ones uninitialised

    def check(self, export: Export) -> None:
        head = export.head
        # The library builds its layers from the config and sets the target's width in it.
        if head.hidden_size != head.target_hidden_size:
            raise UserError(
                "the speculators layout holds heads as wide as their target "
                f"({head.target_hidden_size}); this one has hidden_size {head.hidden_size}",
                do=USE_VLLM,
            )
        if _has_mask_token(head) and head.fc_norm:
            raise UserError(
                "vLLM does not read fc_norm of a parallel head in the speculators layout",
                do=USE_VLLM,
            )
        check_width(export, "the speculators layout's")

    def own_fields(self, export: Export) -> dict[str, Any]:
        """Return the keys of the model type.

        There is no `model_type` at the top (it would select the wrong parser),
        `num_aux_hidden_states` is inside the layer config (vLLM reads the size of fc there), and
        every norm flag is written (the defaults of vLLM, the library and the families differ).
        """
        head = export.head
        mask_token = {"mask_token_id": head.mask_token_id} if _has_mask_token(head) else {}
        return {
            "target_hidden_size": head.target_hidden_size,
            "eagle_aux_hidden_state_layer_ids": list(head.boundaries),
            "norm_before_residual": head.norm_before_residual,
            "norm_before_fc": head.norm_before_fc,
            "fc_norm": head.fc_norm,
            "norm_output": head.norm_output,
            "embed_requires_grad": _has_mask_token(head),
            **mask_token,
        }

    def layer_config(self, export: Export) -> dict[str, Any]:
        """Return the config of a Llama's layers, or with norms of q and k of a Qwen3's."""
        head = export.head
        fields = layer_fields(
            head.model_copy(update={"max_position_embeddings": export.positions}), ""
        )
        rope = fields["rope_parameters"]
        for key in ("dtype", "bias", "draft_vocab_size", "target_hidden_size", "rope_scaling"):
            del fields[key]
        # transformers 5 treats rope_scaling as another name of rope_parameters, and vLLM assigns
        # keys in file order: a null, or a copy without theta, would overwrite the RoPE. So
        # rope_scaling is an equal copy or, without scaling, absent.
        scaling = {} if rope["rope_type"] == "default" else {"rope_scaling": dict(rope)}
        return {
            "model_type": "qwen3" if head.qk_norm else "llama",
            **fields,
            **scaling,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "use_cache": True,
            "pretraining_tp": 1,
            "layer_types": ["full_attention"] * head.num_layers,
            "num_aux_hidden_states": len(head.boundaries),
        }

    def tensors(self, tensors: dict[str, Tensor], export: Export) -> dict[str, Tensor]:
        """Return the head's tensors; the library's `mask_hidden` has the shape [1, 1, F]."""
        if MASK_HIDDEN not in tensors:
            return tensors
        return tensors | {MASK_HIDDEN: tensors[MASK_HIDDEN][None]}


class BlockSpeculators(_LibraryLayout):
    """The library's layout of DSpark and DFlash."""

    def check(self, export: Export) -> None:
        check_block(export, "the speculators layout")

    def tensors(self, tensors: dict[str, Tensor], export: Export) -> dict[str, Tensor]:
        return bake_temperature(tensors, export)

    def own_fields(self, export: Export) -> dict[str, Any]:
        native = native_config(export.head, "")
        return {
            "aux_hidden_state_layer_ids": list(export.head.boundaries),
            "sliding_window_non_causal": not export.head.is_causal,
            **{name: native[name] for name in _OWN_BLOCK_KEYS if name in native},
        }

    def layer_config(self, export: Export) -> dict[str, Any]:
        """Return the native keys that are not at the top.

        `is_causal` stays: vLLM runs DSpark's sliding layers causally without it. `rope_scaling`
        does not: transformers 5 reads it as another name of `rope_parameters`.
        """
        head = export.head.model_copy(update={"max_position_embeddings": export.positions})
        native = native_config(head, export.dtype_name)
        left_out = {*_OWN_BLOCK_KEYS, *_NATIVE_BLOCK_KEYS}
        return {name: value for name, value in native.items() if name not in left_out}


def _proposal_config(export: Export, algorithm: str) -> dict[str, Any]:
    """Return `speculators_config`: how a server drafts by default, and for which target."""
    architectures = export.target.get("architectures") or [export.head.target.architecture]
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {
                "proposal_type": "greedy",
                "speculative_tokens": export.k,
                "verifier_accept_k": 1,
                "accept_tolerance": 0.0,
            }
        ],
        "verifier": {"name_or_path": export.target_name, "architectures": architectures},
    }


def _has_mask_token(head: HeadConfig) -> bool:
    return get_family(head.family).trains_mask
