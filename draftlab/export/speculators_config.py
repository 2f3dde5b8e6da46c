"""config.json of the speculators layout (CONTRACTS §9), as its library and vLLM read it."""

from __future__ import annotations

from typing import Any

import torch

from draftlab.heads.config import HeadConfig

LAYOUT_VERSION = "0.9.0"
"""Version of the speculators library whose files this layout follows."""

_TYPES = {"eagle3": ("eagle3", "Eagle3DraftModel"), "ptd": ("peagle", "PEagleDraftModel")}
"""The library's name and class of each family."""


def layout_name(head: HeadConfig) -> str:
    """What README.md calls the layout."""
    kind, _ = _TYPES[head.family]
    return f"speculators layout {LAYOUT_VERSION} (`speculators_model_type: {kind}`)"


def speculators_config(
    head: HeadConfig, target: dict[str, Any], name: str, k: int, dtype: torch.dtype
) -> dict[str, Any]:
    """config.json: a pure function of draftlab.json, the target's config, its name, K and dtype.

    There is no `model_type` at the top (it would pick the wrong parser), `num_aux_hidden_states`
    sits inside the layer config (vLLM sizes fc by it), and every norm flag is written (vLLM's
    defaults differ from the library's, and from family to family).
    """
    kind, architecture = _TYPES[head.family]
    # vLLM calls it pard_token; the library embeds it in masked slots.
    masks = {} if head.mask_token_id is None else {"mask_token_id": head.mask_token_id}
    return {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_version": LAYOUT_VERSION,
        "dtype": str(dtype).removeprefix("torch."),
        "tie_word_embeddings": False,
        "draft_vocab_size": head.draft_vocab_size,
        "target_hidden_size": head.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(head.boundaries),
        "norm_before_residual": head.norm_before_residual,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "embed_requires_grad": head.family == "ptd",
        **masks,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": k,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {
                "name_or_path": name,
                "architectures": target.get("architectures") or [head.target.architecture],
            },
        },
        "transformer_layer_config": _layer_config(head, positions(head, target)),
    }


def positions(head: HeadConfig, target: dict[str, Any]) -> int:
    """The target's `max_position_embeddings`.

    Servers stop drafting, or shorten the target, at the smaller of the head's and the target's.
    """
    text = target.get("text_config", target)
    return text.get("max_position_embeddings", head.max_position_embeddings)


def _layer_config(head: HeadConfig, positions: int) -> dict[str, Any]:
    """The decoder layers, as a whole config of a Llama, or with norms of q and k of a Qwen3."""
    rope = {"rope_type": "default", **head.rope_parameters}
    # transformers 5 takes rope_scaling for another name of rope_parameters, and vLLM assigns keys
    # in file order: a null, or a copy without theta, would overwrite the rope. So the older
    # spelling is an equal copy or, where there is nothing to scale, absent.
    scaling = {} if rope["rope_type"] == "default" else {"rope_scaling": dict(rope)}
    return {
        "model_type": "qwen3" if head.qk_norm else "llama",
        "vocab_size": head.vocab_size,
        "hidden_size": head.hidden_size,
        "intermediate_size": head.intermediate_size,
        "num_hidden_layers": head.num_layers,
        "num_attention_heads": head.num_attention_heads,
        "num_key_value_heads": head.num_key_value_heads,
        "head_dim": head.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": head.rms_norm_eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "use_cache": True,
        "pretraining_tp": 1,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * head.num_layers,
        "max_position_embeddings": positions,
        "rope_theta": rope["rope_theta"],
        **scaling,
        "rope_parameters": rope,
        "num_aux_hidden_states": len(head.boundaries),
    }
