"""Targets and heads with random weights, and a verifier that accepts drafts with known probability.

Kernels take the same time for any weights, so these stand for trained models of the same shapes in
benchmarks of speed.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from draftlab.heads.config import TargetIdentity, make_head_config
from draftlab.heads.folder import new_head
from draftlab.heads.head import DraftHead
from draftlab.kernels.sampling.types import VerifyResult
from draftlab.kernels.verify import verify
from draftlab.target_model.attention import ATTENTION
from draftlab.target_model.model import Target
from draftlab.target_model.replacements import replace_layers

MASK = 128_255  # the mask token of parallel heads, which any token may be
HEADS: dict[str, dict[str, Any]] = {
    "chain": {"embeddings": "target"},
    "parallel": {"family": "peagle", "embeddings": "own", "mask_token_id": MASK},
    "dspark": {
        "family": "dspark",
        "num_layers": 5,
        "draft_vocab_size": 128256,
        "mask_token_id": MASK,
        "sample_from_anchor": True,
        "markov_rank": 256,
        "confidence": True,
    },
}
MODEL_TYPES = {"llama": "llama", "small": "qwen3", "tiny": "llama"}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {  # Llama-3.1-8B
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    "small": {  # 22 M parameters
        "vocab_size": 8192,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "vocab_size": 500,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
SMALL_HEAD: dict[str, Any] = {
    "boundaries": (1, 3, 5),
    "hidden_size": 512,
    "target_hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 8192,
    "draft_vocab_size": 4096,
}
RANDOM = TargetIdentity(
    name="random", fingerprint="", architecture="", tokenizer_sha256="", template_sha256=""
)
SYNTHETIC = 0.6
COINS = 1024  # different sequences of coin tosses; a request's id picks one


@cache
def passing_runs(device: torch.device) -> Tensor:
    """Return how many drafts in a row pass from each position on, int64 [sequences, positions].

    A step only looks it up, so that the stand-in takes little of the time that is measured.
    """
    numbers = torch.rand(COINS, 8192, generator=torch.Generator().manual_seed(0))
    fails = numbers >= SYNTHETIC
    position = torch.arange(numbers.shape[1])
    next_fail = torch.where(fails, position, len(position)).flip(1).cummin(1).values.flip(1)
    return (next_fail - position).to(device)


def synthetic_verify(
    logits: Tensor, drafts: Tensor, num_drafts: Tensor, *rest: Any, **options: Any
) -> VerifyResult:
    """Run the real verifier, then accept each draft with probability `SYNTHETIC`.

    The real result is dropped; a captured graph computes it all the same.
    """
    result = verify(logits, drafts, num_drafts, *rest, **options)
    _, positions, metadata = rest
    runs = passing_runs(drafts.device)[metadata.prompt.remainder(COINS), positions]
    return VerifyResult(runs.minimum(num_drafts), result.emitted, result.probability)


def target_config(kind: str, **changed: Any) -> PretrainedConfig:
    """Return the config of a target of one of `SHAPES`."""
    shape = {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    }
    return CONFIG_MAPPING[MODEL_TYPES[kind]](**shape | SHAPES[kind] | changed)


def random_target(device: torch.device, kind: str) -> Target:
    """Return a random target of one of `SHAPES` in bfloat16."""
    dtype = torch.bfloat16
    config = target_config(kind, attn_implementation=ATTENTION, dtype=dtype)
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    with device:
        model = AutoModelForCausalLM.from_config(config)
    torch.set_default_dtype(torch.float32)
    replace_layers(model)
    return Target(model.eval().requires_grad_(False), Path("random"), f"random {kind}")


def random_head(target: Target, device: torch.device, **changed: Any) -> DraftHead:
    """Return a random head, by default an EAGLE3 head; `changed` are fields of its config."""
    layers = target.num_layers
    fields: dict[str, Any] = {
        "boundaries": (2, layers // 2, layers - 3),
        "target_num_layers": layers,
        "target_hidden_size": 4096,
        "hidden_size": 4096,
        **SHAPES["llama"],
        "max_position_embeddings": 8192,
        "vocab_size": 128256,
        "draft_vocab_size": 32000,
        "k_trained": 8,
        "target": RANDOM,
    }
    config = make_head_config(**(fields | changed))
    with device:
        head = new_head(config).to(target.dtype)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.02)
    size = config.draft_vocab_size
    head.set_draft_vocabulary(torch.arange(size, device=device) * (config.vocab_size // size))
    return head.eval().requires_grad_(False)
