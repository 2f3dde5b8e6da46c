"""The table family × program: how each program expects the files of a family's heads.

- **speculators** (servers §9), which vLLM serves as it stands. Tensor names are those of the head
  folder; the target's embeddings are added, and config.json is complete: vLLM applies no defaults
  of a model, so that a missing key means a different head without an error (servers §1.6).
- **native** (servers §1, §5 to §7, §12): vLLM, SGLang and llama.cpp. Heads of EAGLE3's kind are
  `LlamaForCausalLMEagle3` in all programs. A head of one layer is written as `midlayer.*`, which
  every version of every program reads; `layers.0.*` is newer. Embeddings are left out if they are
  the target's, since programs share those then. With heads of EAGLE's first generation vLLM and
  SGLang use the target's embeddings and lm_head, and no norm. One folder of a block head serves all
  programs. Of MTP layers it is the changed part of the target's checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from draftlab.export.launch import (
    block_sglang_text,
    llamacpp_text,
    sglang_text,
    vllm_delta_text,
    vllm_text,
)
from draftlab.export.layout import USE_VLLM, Export, Layout, plain_config
from draftlab.export.refusals import (
    LLAMACPP_BLOCK,
    LLAMACPP_EAGLE3,
    SGLANG_BLOCK,
    SGLANG_EAGLE3,
    SGLANG_EMBEDDINGS,
    SPECULATORS_BLOCK,
    SPECULATORS_EAGLE3,
    VLLM_WINDOW,
    refuse_block,
    refuse_width,
)
from draftlab.export.speculators_config import (
    SPECULATORS,
    block_speculators_config,
    eagle3_speculators_config,
)
from draftlab.heads.family import Family
from draftlab.heads.mtp_checkpoint import checkpoint_tensors


def _midlayer(tensors: dict[str, Tensor], export: Export) -> dict[str, Tensor]:
    """Name the only layer as every version of every program does."""
    if export.head.num_layers > 1:
        return tensors
    return {
        f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name: x
        for name, x in tensors.items()
    }


def _fc_bias(tensors: dict[str, Tensor], _: Export) -> dict[str, Tensor]:
    """Add a bias of zeros: SGLang initialises a missing one at random, and vLLM refuses one."""
    weight = tensors["fc.weight"]
    return tensors | {"fc.bias": weight.new_zeros(len(weight))}


def _library_mask(tensors: dict[str, Tensor], _: Export) -> dict[str, Tensor]:
    """Give `mask_hidden` the library's shape [1, 1, F]."""
    return {name: x[None] if name == "mask_hidden" else x for name, x in tensors.items()}


def _baked(tensors: dict[str, Tensor], export: Export) -> dict[str, Tensor]:
    """Divide the confidence head by the temperature to bake, if any.

    σ((w · x + b) / T) = σ(w/T · x + b/T), so that the only error is the rounding to the dtype.
    """
    temperature = export.serving and export.serving.baked_temperature
    names = ("confidence_head.proj.weight", "confidence_head.proj.bias") if temperature else ()
    return tensors | {
        name: (tensors[name].float() / temperature).to(export.dtype) for name in names
    }


def _sglang_config(export: Export) -> dict[str, Any]:
    config = plain_config(export)
    if export.is_gpt_oss and export.reads_last_boundary:
        # Only for these targets SGLang reads ids that name the last boundary as boundaries.
        ids = {"eagle_aux_hidden_state_layer_ids": list(export.head.boundaries)}
        config["eagle_config"] = {**config["eagle_config"], **ids}
    return config


def _sglang_eagle_config(export: Export) -> dict[str, Any]:
    return plain_config(export) | {"architectures": ["LlamaForCausalLMEagle"]}


def _checkpoint_layout(tensors: dict[str, Tensor], export: Export) -> dict[str, Tensor]:
    """Name and quantise the tensors as the target's checkpoint does."""
    checkpoint = export.checkpoint
    assert checkpoint is not None  # exports of changed tensors have it
    return checkpoint.quantised(checkpoint_tensors(export.head, tensors, checkpoint.files))


def _library(family: Family, config: Callable[..., dict[str, Any]], **options: Any) -> Layout:
    """Return the speculators layout of one of the library's model types."""
    title = (
        f"speculators layout {SPECULATORS} (`speculators_model_type: {family.speculators_type}`)"
    )
    return Layout(title, partial(vllm_text, alone=True), config, **options)


def eagle3_layouts(family: Family) -> dict[str, Layout | str]:
    """Return the layouts of EAGLE3 heads.

    llama.cpp's `convert_hf_to_gguf.py` recognises a head by `draft_vocab_size` and a single layer,
    reads the boundaries from the top of config.json, permutes q and k itself and converts offsets
    in d2t to ids.
    """
    return {
        "speculators": _library(
            family,
            eagle3_speculators_config,
            tensors=_library_mask,
            refusals=SPECULATORS_EAGLE3,
            ships_embeddings=True,  # the library leaves missing ones uninitialised
        ),
        "vllm": Layout(
            "vLLM layout", tensors=_midlayer, refusals=(refuse_width("vLLM's"), VLLM_WINDOW)
        ),
        "sglang": Layout(
            "SGLang layout",
            sglang_text,
            _sglang_config,
            _midlayer,
            SGLANG_EAGLE3,
            reads_norm_before_residual=False,
        ),
        "llamacpp": Layout(
            "llama.cpp layout", llamacpp_text, tensors=_midlayer, refusals=LLAMACPP_EAGLE3
        ),
    }


def peagle_layouts(family: Family) -> dict[str, Layout | str]:
    """Return the layouts of parallel heads."""
    elsewhere = "vLLM serves this head (--to vllm or --to speculators)"
    return eagle3_layouts(family) | {
        "sglang": f"SGLang has no masked slots, it drafts one token a pass: {elsewhere}",
        "llamacpp": f"llama.cpp's EAGLE3 drafts one token a pass, has no masked slots: {elsewhere}",
    }


def eagle_layouts(_: Family) -> dict[str, Layout | str]:
    """Return the layouts of first-generation EAGLE heads."""
    return {
        "speculators": f"vLLM reads speculators' eagle3 and peagle, not its eagle: {USE_VLLM}",
        "vllm": Layout(
            "vLLM layout (`LlamaForCausalLM`, served with method eagle)",
            refusals=(refuse_width("vLLM's"),),
        ),
        "sglang": Layout(
            "SGLang layout (`LlamaForCausalLMEagle`)",
            partial(sglang_text, algorithm="EAGLE"),
            _sglang_eagle_config,
            _fc_bias,
            (refuse_width("SGLang's"), SGLANG_EMBEDDINGS),
        ),
        "llamacpp": "llama.cpp has no first-generation EAGLE: vLLM serves this head (--to vllm)",
    }


def eagle_llama4_layouts(_: Family) -> dict[str, Layout | str]:
    """Return the layouts of dense Llama 4 heads.

    The head folder is in vLLM's layout already: Llama 4's names, RoPE on neighbouring pairs, a
    config.json with the keys that have no default there. The export adds the target's embeddings,
    since older versions require a checkpoint to hold every tensor.
    """
    title = "vLLM layout (`Llama4ForCausalLM`, served as `EagleLlama4ForCausalLM`)"
    return {
        "speculators": f"the format has Llama's layers and Qwen3's, not Llama 4's: {USE_VLLM}",
        "vllm": Layout(title, ships_embeddings=True),
        "sglang": "SGLang has no EAGLE drafter of Llama 4's layers: vLLM serves this head "
        "(--to vllm)",
        "llamacpp": "llama.cpp has no such EAGLE: vLLM serves this head (--to vllm)",
    }


def mtp_layouts(_: Family) -> dict[str, Layout | str]:
    """Return the layouts of MTP layers.

    The old layer stays in the checkpoint's own files. vLLM reads the files in the order of their
    names, so that the new one is read last (`DELTA`).
    """
    return {
        "speculators": f"vLLM reads no MTP layers in this format: {USE_VLLM}",
        "vllm": Layout(
            "the changed tensors in the checkpoint's own layout (vLLM's method mtp)",
            vllm_delta_text,
            config=lambda export: export.target,
            tensors=_checkpoint_layout,
            is_delta=True,
        ),
        "sglang": f"in which order SGLang reads the old layer and the new is not known: {USE_VLLM}",
        "llamacpp": "llama.cpp reads an MTP layer from its target's GGUF file: convert the folder "
        "that launch.md makes of the export to vLLM (--to vllm)",
    }


def block_layouts(family: Family) -> dict[str, Layout | str]:
    """Return the layouts of block-parallel heads; the native one is the head folder's.

    Embeddings are never written, since all programs use the target's; lm_head only over a reduced
    draft vocabulary. `is_causal` and `sample_from_anchor` are always written, because programs
    disagree about their defaults.
    """
    native = "{} layout, which vLLM, SGLang and llama.cpp read alike".format
    config, sglang = block_speculators_config, (native("SGLang"), block_sglang_text)
    return {
        "speculators": _library(family, config, tensors=_baked, refusals=SPECULATORS_BLOCK),
        "vllm": Layout(native("vLLM"), tensors=_baked, refusals=refuse_block("vLLM")),
        "sglang": Layout(*sglang, tensors=_baked, refusals=SGLANG_BLOCK, reads_confidence=True),
        "llamacpp": Layout(
            native("llama.cpp"), llamacpp_text, tensors=_baked, refusals=LLAMACPP_BLOCK
        ),
    }
