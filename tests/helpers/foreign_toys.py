"""Heads of the toy target."""

from __future__ import annotations

from pathlib import Path

import torch

from draftlab.heads.config import TargetIdentity, make_head_config
from draftlab.heads.folder import new_head, save_head
from draftlab.target_model.fingerprint import fingerprint
from draftlab.target_model.loading import load_tokenizer
from draftlab.target_model.settings import TargetSettings
from draftlab.text.chat_template import template_sha256, tokenizer_sha256

LAYERS, HIDDEN, VOCAB, POSITIONS = 6, 64, 289, 512
BOUNDARIES = (1, 3, 5)


def make_head(
    folder: Path, target: Path, *, dtype: torch.dtype = torch.bfloat16, **changed
) -> Path:
    """Save a random head of the toy target with large weights."""
    tokenizer = load_tokenizer(TargetSettings(path=str(target)))
    fields = {
        "boundaries": BOUNDARIES,
        "target_num_layers": LAYERS,
        "target_hidden_size": HIDDEN,
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0},
        "max_position_embeddings": POSITIONS,
        "vocab_size": VOCAB,
        "draft_vocab_size": 100,
        "k_trained": 7,
        "target": TargetIdentity(
            name=str(target),
            fingerprint=fingerprint(target),
            architecture="LlamaForCausalLM",
            tokenizer_sha256=tokenizer_sha256(tokenizer),
            template_sha256=template_sha256(tokenizer),
        ),
        **changed,
    }
    head = new_head(make_head_config(**fields))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    size = head.config.draft_vocab_size
    head.set_draft_vocabulary(torch.randperm(VOCAB, generator=generator)[:size].sort().values)
    save_head(folder, head, dtype)
    return folder
