"""Layouts of block-parallel heads (servers §12): one native folder serves vLLM, SGLang, llama.cpp.

Embeddings are never written, since all programs use the target's; lm_head only over a reduced draft
vocabulary. `is_causal` and `sample_from_anchor` are always written, because programs disagree about
their defaults.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from draftlab.errors import UserError
from draftlab.export.launch_text import block_sglang_text, is_hub_id, llamacpp_text, vllm_text
from draftlab.export.layout import Export, Layout
from draftlab.export.serving_tables import SPS, STS
from draftlab.export.speculators import LAYOUT_VERSION, proposal_config
from draftlab.export.vllm_sglang import HeadFolderLayout
from draftlab.heads.family import get_family
from draftlab.heads.vllm_config import native_config

_NEUTRAL = {
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "logit_scale": 1.0,
    "scale_emb": 1.0,
    "final_logit_softcapping": None,
}
"""Keys of a target's config that scale embeddings or logits, with the value that changes nothing.
Servers apply none of them to a block head, except `logit_scale` in vLLM."""
CONFIDENCE = ("confidence_head.proj.weight", "confidence_head.proj.bias")
_SCALED_EMBEDDINGS = "gemma"
"""Targets with this in their model_type multiply embeddings by √H without a key that says so."""


class BlockNative(HeadFolderLayout):
    """The native layout, which is that of the head folder.

    Args:
        program: "vLLM", "SGLang" or "llama.cpp".
    """

    def __init__(self, program: str) -> None:
        self.program = program
        self.title = f"{program} layout, which vLLM, SGLang and llama.cpp read alike"

    def check(self, export: Export) -> None:
        check_block(export, self.program)
        head = export.head
        if self.program == "SGLang" and head.draft_vocab_size != head.vocab_size:
            raise UserError(
                "SGLang drafts with its target's lm_head, over the whole vocabulary; this head has "
                f"{head.draft_vocab_size:,} of {head.vocab_size:,} tokens",
                do="use --to vllm, or train a head with the whole vocabulary",
            )
        if self.program == "SGLang" and export.serving and export.k != head.k_trained:
            raise UserError(
                f"SGLang drafts all {head.k_trained} slots of the block and wants a temperature "
                f"for each; the calibration has {export.k}",
                where="export.k",
                do=f"`draftlab eval --calibrate --k {head.k_trained}`, and export with that K",
            )

    def tensors(self, tensors: dict[str, Tensor], export: Export) -> dict[str, Tensor]:
        return bake_temperature(tensors, export)

    def json_files(self, export: Export) -> dict[str, dict[str, Any]]:
        files = super().json_files(export)
        serving = export.serving
        if serving is None or serving.temperatures is None or self.program != "SGLang":
            return files
        rates = {SPS: serving.sps_json()} if serving.step_rates else {}
        return files | {STS: serving.sts_json()} | rates

    def launch(self, export: Export, path: Path) -> str:
        if self.program == "SGLang":
            return block_sglang_text(export, path)
        if self.program == "llama.cpp":
            return llamacpp_text(export, path)
        return vllm_text(export, path)


class BlockSpeculators(Layout):
    """The speculators library's layout of DSpark and DFlash."""

    def __init__(self, model_type: str, architecture: str) -> None:
        self.model_type, self.architecture = model_type, architecture
        self.title = f"speculators layout {LAYOUT_VERSION} (`speculators_model_type: {model_type}`)"

    def check(self, export: Export) -> None:
        check_block(export, "the speculators layout")

    def tensors(self, tensors: dict[str, Tensor], export: Export) -> dict[str, Tensor]:
        return bake_temperature(tensors, export)

    def config(self, export: Export) -> dict[str, Any]:
        head = export.head.model_copy(update={"max_position_embeddings": export.positions})
        native = native_config(head, export.dtype_name)
        own = {
            name: native.pop(name)
            for name in ("markov_rank", "markov_head_type", "enable_confidence_head",
                         "confidence_head_with_markov", "mask_token_id", "block_size",
                         "sample_from_anchor")
            if name in native
        }  # fmt: skip
        for name in ("architectures", "dflash_config", "target_layer_ids", "num_target_layers",
                     "torch_dtype", "dtype", "draft_vocab_size"):  # fmt: skip
            native.pop(name, None)
        # is_causal stays: vLLM runs DSpark's sliding layers causally without it.
        # transformers 5 reads rope_scaling as another name of rope_parameters.
        del native["rope_scaling"]
        return {
            "architectures": [self.architecture],
            "speculators_model_type": self.model_type,
            "speculators_version": LAYOUT_VERSION,
            "dtype": export.dtype_name,
            "tie_word_embeddings": False,
            "draft_vocab_size": head.draft_vocab_size,
            "aux_hidden_state_layer_ids": list(head.boundaries),
            "sliding_window_non_causal": not head.is_causal,
            **own,
            "speculators_config": proposal_config(export, self.model_type),
            "transformer_layer_config": native,
        }

    def launch(self, export: Export, path: Path) -> str:
        return vllm_text(export, path, alone=is_hub_id(export.target_name))


def bake_temperature(tensors: dict[str, Tensor], export: Export) -> dict[str, Tensor]:
    """Return the tensors with the confidence head divided by the temperature to bake, if any.

    σ((w · x + b) / T) = σ(w/T · x + b/T), so that the only error is the rounding to the dtype.
    """
    temperature = export.serving and export.serving.baked_temperature
    if not temperature:
        return tensors
    baked = {name: (tensors[name].float() / temperature).to(export.dtype) for name in CONFIDENCE}
    return tensors | baked


def check_block(export: Export, program: str) -> None:
    """Check that a program can serve a block head of this target.

    Raises:
        UserError: the reason why not.
    """
    head, text = export.head, export.target.get("text_config", export.target)
    scaled = [k for k, v in _NEUTRAL.items() if text.get(k, v) not in (v, None)]
    if _SCALED_EMBEDDINGS in str(text.get("model_type", "")):
        scaled.append("embeddings times √H")
    if scaled:
        title = get_family(head.family).title
        raise UserError(
            f"{program} runs {title} heads on plain embeddings and logits, and this target scales "
            f"them: {', '.join(scaled)}",
            do="use the head in draftlab alone, or export an EAGLE3 head for this target",
        )
    if head.boundaries[0] == 0 or head.boundaries[-1] == head.target_num_layers:
        raise UserError(
            f"{program} reads outputs of the layers 0 to {head.target_num_layers - 2}, boundaries "
            f"1 to {head.target_num_layers - 1}; this head has {list(head.boundaries)}",
            do="record and train with other boundaries",
        )
    if head.is_causal and program == "the speculators layout":
        raise UserError(
            "the speculators layout has no key for causal blocks of full attention",
            do="use --to vllm, sglang or llamacpp",
        )
    if export.k > head.k_trained:
        raise UserError(
            f"expected at most {head.k_trained} draft tokens, all slots of the block, found "
            f"{export.k}",
            where="export.k",
            do=f"lower it to {head.k_trained}",
        )
