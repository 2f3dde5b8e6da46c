"""Configs of small heads, and heads with random weights."""

from __future__ import annotations

import torch
from torch import Tensor

from draftlab.heads.config import HeadConfig, TargetIdentity, make_head_config
from draftlab.heads.eagle3 import Eagle3Head
from draftlab.heads.folder import new_head
from draftlab.heads.head import DraftHead

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 20000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": True,
}
PEAGLE = {"family": "peagle", "mask_token_id": 7, "embeddings": "own", "num_layers": 2}
EAGLE = {"family": "eagle", "boundaries": (5,), "target_hidden_size": 24, "draft_vocab_size": 50}
LLAMA4_ATTENTION = {
    "no_rope_layers": (1, 0),
    "attention_chunk_size": 5,
    "use_qk_norm": True,
    "attn_temperature_tuning": True,
    "floor_scale": 3,
    "attn_scale": 0.5,
}
LLAMA4_HEAD: dict[str, object] = {
    "family": "eagle_llama4",
    "boundaries": (5,),
    "target_hidden_size": 24,
    "draft_vocab_size": 50,
    "num_layers": 2,
    "llama4": LLAMA4_ATTENTION,
}
"""Fields of a dense Llama 4 head of two layers."""


def make_config(**changes: object) -> HeadConfig:
    fields = {
        "boundaries": (0, 2, 3, 5),
        "target_num_layers": 5,
        "target_hidden_size": 20,
        "hidden_size": 24,
        "intermediate_size": 36,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-2,  # large enough to be seen when it is left out
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        "max_position_embeddings": 128,
        "vocab_size": 50,
        "draft_vocab_size": 21,
        "k_trained": 4,
        "target": TargetIdentity(
            name="toy",
            fingerprint="f",
            architecture="Toy",
            tokenizer_sha256="t",
            template_sha256="c",
        ),
    }
    return make_head_config(**(fields | changes))


def randomise(head: DraftHead, seed: int, *, weights: float, norms: float) -> None:
    """Draw the draft vocabulary and all parameters: of norms around 1, others around 0.

    Args:
        weights, norms: standard deviations; small ones would hide mistakes of RoPE and norms.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + norms * noise if parameter.ndim == 1 else weights * noise)
    config = head.config
    ids = torch.randperm(config.vocab_size, generator=generator)[: config.draft_vocab_size]
    head.set_draft_vocabulary(ids.sort().values)


def make_head(seed: int = 0, **changed: object) -> Eagle3Head:
    """Return a head with large random weights in float64."""
    head = new_head(make_config(**changed)).double()
    randomise(head, seed, weights=0.4, norms=0.5)
    return head.requires_grad_(False)


def half_split(weight: Tensor, heads: int) -> Tensor:
    """Return rows in vLLM's and transformers' order: pairs (2i, 2i + 1) become (i, i + d/2)."""
    return weight.view(heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """Return rows in llama.cpp's and Llama 4's order, which rotates neighbouring channels."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
