"""The native layouts of vLLM, SGLang and llama.cpp (servers §1.1, §1.2, §1.3, §5, §6, §7, §12).

Heads of EAGLE3's kind are `LlamaForCausalLMEagle3` in all programs. A head of one layer is written
as `midlayer.*`, which every version of every program reads; `layers.0.*` is newer. Embeddings are
left out if they are the target's, since programs share those then. With heads of EAGLE's first
generation vLLM and SGLang use the target's embeddings and lm_head, and no norm. One folder of a
block head serves all programs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from draftlab.errors import UserError
from draftlab.export.launch_text import block_sglang_text, llamacpp_text, sglang_text, vllm_text
from draftlab.export.layout import Export, Layout, check_width
from draftlab.export.serving_tables import SPS, STS
from draftlab.heads.config import HeadConfig
from draftlab.heads.family import get_family
from draftlab.heads.vllm_config import native_config

MIDLAYER, LAYER = "midlayer.", "layers.0."
USE_VLLM = "use --to vllm"
_NO_QK_NORM = "its EAGLE3 layer has no norms of queries and keys"
_WRONG_TOKENS = "would draft wrong tokens without a warning"
NUM_BOUNDARIES = 3
"""Boundaries that llama.cpp reads."""
CONFIDENCE_TEMPERATURE = 1.0
"""Temperature of the draft probability that `--spec-draft-p-min` is compared with (servers §13)."""
CONFIDENCE = ("confidence_head.proj.weight", "confidence_head.proj.bias")
_NEUTRAL = {
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "logit_scale": 1.0,
    "scale_emb": 1.0,
    "final_logit_softcapping": None,
}
"""Keys of a target's config that scale embeddings or logits, with the value that changes nothing.
Servers apply none of them to a block head, except `logit_scale` in vLLM."""
_SCALED_EMBEDDINGS = "gemma"
"""Targets with this in their model_type multiply embeddings by √H without a key that says so."""


class HeadFolderLayout(Layout):
    """The files of the head folder itself, with the target's number of positions (servers §1.0)."""

    def config(self, export: Export) -> dict[str, Any]:
        head = export.head.model_copy(update={"max_position_embeddings": export.positions})
        return native_config(head, export.dtype_name)

    def launch(self, export: Export, path: Path) -> str:
        return vllm_text(export, path)


class Vllm(HeadFolderLayout):
    """vLLM's layout of EAGLE3 and parallel heads, `LlamaForCausalLMEagle3`."""

    program = "vLLM"
    refused_flags: tuple[tuple[str, str], ...] = ()
    """Flags of draftlab.json that the program cannot serve, each with the reason."""

    @property
    def title(self) -> str:
        return f"{self.program} layout"

    def check(self, export: Export) -> None:
        check_width(export, f"{self.program}'s")
        for flag, reason in self.refused_flags:
            if getattr(export.head, flag, False):
                what = f"{self.program} cannot serve a head with {flag}: {reason}"
                raise UserError(what, do=USE_VLLM)

    def tensors(self, tensors: dict[str, Tensor], export: Export) -> dict[str, Tensor]:
        if export.head.num_layers > 1:
            return tensors
        return {
            MIDLAYER + name.removeprefix(LAYER) if name.startswith(LAYER) else name: tensor
            for name, tensor in tensors.items()
        }


class Sglang(Vllm):
    """SGLang's layout. SGLang counts outputs of layers and does not read `norm_before_residual`."""

    program = "SGLang"
    reads_norm_before_residual = False
    refused_flags = (
        ("qk_norm", _NO_QK_NORM),
        ("norm_before_residual", f"it does not read the flag, and {_WRONG_TOKENS}"),
    )

    def check(self, export: Export) -> None:
        super().check(export)
        head, last = export.head, export.head.target_num_layers
        if not head.rope_parameters.get("truncate", True):
            raise UserError(
                "SGLang rounds the bounds of YaRN, and this head's are not (truncate)",
                where="rope_parameters",
                do=USE_VLLM,
            )
        refuse_own_embeddings(head)
        if head.boundaries[0] == 0:
            raise UserError(
                "SGLang cannot extract boundary 0, the embeddings: it counts outputs of layers",
                do=USE_VLLM,
            )
        if head.boundaries[-1] == last and not _is_gpt_oss(export):
            raise UserError(
                f"SGLang extracts boundary {last}, the state after the last layer, only from "
                "gpt-oss targets",
                do=USE_VLLM,
            )
        if head.feature_size == head.hidden_size:
            raise UserError(
                "SGLang leaves out fc if its input is as wide as its output, as with this one "
                "boundary",
                do=USE_VLLM,
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


class LlamaCpp(Vllm):
    """The layout that llama.cpp's `convert_hf_to_gguf.py` reads, for heads that it can compute.

    The converter recognises it by `draft_vocab_size` and a single layer, reads the boundaries from
    the top of config.json, permutes q and k itself and converts offsets in d2t to ids.
    """

    program = "llama.cpp"
    refused_flags = (
        ("qk_norm", _NO_QK_NORM),
        ("fc_norm", f"its converter drops the norms, and it {_WRONG_TOKENS}"),
        ("norm_output", f"it feeds back the state before the norm, and {_WRONG_TOKENS}"),
    )

    def check(self, export: Export) -> None:
        super().check(export)
        if export.head.rope_parameters.get("rope_type") == "yarn":
            raise UserError(
                "a head with YaRN has not been tried in llama.cpp",
                where="rope_parameters",
                do=USE_VLLM,
            )
        boundaries = list(export.head.boundaries)
        if len(boundaries) != NUM_BOUNDARIES:
            raise UserError(
                f"llama.cpp reads exactly {NUM_BOUNDARIES} boundaries, this head has "
                f"{len(boundaries)}: {boundaries}",
                do=f"{USE_VLLM}, or train a head with three",
            )
        one = export.serving and export.serving.calibration
        if one and one.confidence_temperature not in (None, CONFIDENCE_TEMPERATURE):
            raise UserError(
                "llama.cpp reads a draft's confidence at temperature "
                f"{CONFIDENCE_TEMPERATURE:g}, this calibration states it at "
                f"{one.confidence_temperature:g}, that of its sampled drafts",
                where="export.calibration",
                do="`draftlab eval --calibrate --draft-probs off` makes one of argmax drafts",
            )

    def launch(self, export: Export, path: Path) -> str:
        return llamacpp_text(export, path)


class VllmEagle(HeadFolderLayout):
    """vLLM's layout of first-generation EAGLE heads."""

    title = "vLLM layout (`LlamaForCausalLM`, served with method eagle)"

    def check(self, export: Export) -> None:
        check_width(export, "vLLM's")


class SglangEagle(HeadFolderLayout):
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


class BlockNative(HeadFolderLayout):
    """The layout of block-parallel heads, which is that of the head folder (servers §12).

    Embeddings are never written, since all programs use the target's; lm_head only over a reduced
    draft vocabulary. `is_causal` and `sample_from_anchor` are always written, because programs
    disagree about their defaults.

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
                do=f"{USE_VLLM}, or train a head with the whole vocabulary",
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
        files, serving = super().json_files(export), export.serving
        if serving is None or serving.temperatures is None or self.program != "SGLang":
            return files
        rates = {SPS: serving.sps_json()} if serving.step_rates else {}
        return files | {STS: serving.sts_json()} | rates

    def launch(self, export: Export, path: Path) -> str:
        texts = {"SGLang": block_sglang_text, "llama.cpp": llamacpp_text}
        return texts.get(self.program, vllm_text)(export, path)


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


def refuse_own_embeddings(head: HeadConfig) -> None:
    """Raise a `UserError` if SGLang would replace the head's embeddings by the target's."""
    if head.embeddings == "own" and head.hidden_size == head.target_hidden_size:
        raise UserError(
            "SGLang cannot serve a head with embeddings of its own: it replaces them by the "
            "target's, and would draft wrong tokens without a warning",
            do=USE_VLLM,
        )


def _is_gpt_oss(export: Export) -> bool:
    return export.target.get("model_type") == "gpt_oss"
