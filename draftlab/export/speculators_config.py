"""config.json of a head in the layout of the speculators library (servers §9)."""

from __future__ import annotations

from typing import Any

from draftlab.export.layout import Export, plain_config
from draftlab.heads.vllm_config import SELECTOR_KEYS, layer_fields, sliding_fields

SPECULATORS = "0.9.0"
"""Version of the speculators library whose files its layout follows."""
LIBRARY_CLASSES = {
    "eagle3": "Eagle3DraftModel",
    "peagle": "PEagleDraftModel",
    "dspark": "DSparkDraftModel",
    "dflash": "DFlashDraftModel",
    "dflash2": "DFlash2DraftModel",
}
"""The library's classes of heads, by `speculators_model_type`."""
# fmt: off
_OWN_BLOCK_KEYS = (
    "markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov",
    "mask_token_id", "block_size", "sample_from_anchor",
)
"""Keys of a native block config that stand at the top of one in the speculators layout."""
_NATIVE_BLOCK_KEYS = (
    "architectures", "dflash_config", "target_layer_ids", "num_target_layers", "torch_dtype",
    "dtype", "draft_vocab_size", "rope_scaling",
)
"""Keys of a native block config that the speculators layout does not have."""
# fmt: on


def _speculators_config(
    export: Export, own_fields: dict[str, Any], layers: dict[str, Any]
) -> dict[str, Any]:
    """Return config.json of a model type of the library, from its keys and its layers' config."""
    model_type = export.family.speculators_type or ""
    targets = export.target.get("architectures") or [export.head.target.architecture]
    return {
        "architectures": [LIBRARY_CLASSES[model_type]],
        "speculators_model_type": model_type,
        "speculators_version": SPECULATORS,
        "dtype": export.dtype_name,
        "tie_word_embeddings": False,
        "draft_vocab_size": export.head.draft_vocab_size,
        **own_fields,
        "speculators_config": {
            "algorithm": model_type,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": export.k,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": export.target_name, "architectures": targets},
        },
        "transformer_layer_config": layers,
    }


def eagle3_speculators_config(export: Export) -> dict[str, Any]:
    """Return config.json of an EAGLE3 or parallel head in the speculators layout.

    There is no `model_type` at the top (it would select the wrong parser), `num_aux_hidden_states`
    is inside the layer config (vLLM reads the size of fc there), and every norm flag is written
    (the defaults of vLLM, the library and the families differ).
    """
    head: Any = export.head
    own_fields = {
        "target_hidden_size": head.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(head.boundaries),
        "norm_before_residual": head.norm_before_residual,
        "norm_before_fc": head.norm_before_fc,
        "fc_norm": head.fc_norm,
        "norm_output": head.norm_output,
        "embed_requires_grad": export.family.trains_mask,
        **({"mask_token_id": head.mask_token_id} if export.family.trains_mask else {}),
    }
    fields = layer_fields(export.placed_head, "")
    rope = fields["rope_parameters"]
    for key in ("dtype", "bias", "draft_vocab_size", "target_hidden_size", "rope_scaling"):
        del fields[key]
    # transformers 5 treats rope_scaling as another name of rope_parameters, and vLLM assigns keys
    # in file order: a null, or a copy without theta, would overwrite the RoPE. So rope_scaling is
    # an equal copy or, without scaling, absent.
    scaling = {} if rope["rope_type"] == "default" else {"rope_scaling": dict(rope)}
    layers = {
        "model_type": "qwen3" if head.qk_norm else "llama",
        **fields,
        **scaling,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "pretraining_tp": 1,
        "layer_types": ["full_attention"] * head.num_layers,
        **sliding_fields(head),
        "num_aux_hidden_states": len(head.boundaries),
    }
    return _speculators_config(export, own_fields, layers)


def block_speculators_config(export: Export) -> dict[str, Any]:
    """Return config.json of a block head in the speculators layout.

    In the layer config `is_causal` stays: vLLM runs DSpark's sliding layers causally without it.
    `rope_scaling` does not: transformers 5 reads it as another name of `rope_parameters`.
    """
    native = plain_config(export)
    nested = native.get("dflash_config", {})
    own_fields = {
        "aux_hidden_state_layer_ids": list(export.head.boundaries),
        "sliding_window_non_causal": not export.has("is_causal"),
        **{name: native[name] for name in _OWN_BLOCK_KEYS if name in native},
        **{name: nested[name] for name in SELECTOR_KEYS if name in nested},
    }
    left_out = {*_OWN_BLOCK_KEYS, *_NATIVE_BLOCK_KEYS}
    layers = {name: value for name, value in native.items() if name not in left_out}
    return _speculators_config(export, own_fields, layers)
