"""Fixtures: a target, and heads for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draftlab.heads.config import TargetIdentity, make_head_config
from draftlab.heads.folder import new_head, save_head
from draftlab.target_model.fingerprint import fingerprint
from tests.helpers.export_toys import BOUNDARIES, HIDDEN, LAYERS, VOCAB, MakeHead, make_target


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def make_head(target: Path, tmp_path: Path) -> MakeHead:
    """Saves a head with large random weights: small ones would hide mistakes of RoPE and norms."""

    def make(*, dtype: torch.dtype = torch.bfloat16, **changed: object) -> Path:
        fields = {
            "boundaries": BOUNDARIES,
            "target_num_layers": LAYERS,
            "target_hidden_size": HIDDEN,
            "hidden_size": HIDDEN,
            "intermediate_size": 40,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "max_position_embeddings": 64,
            "vocab_size": VOCAB,
            "draft_vocab_size": 40,
            "k_trained": 7,
            "target": TargetIdentity(
                name="org/target",
                fingerprint=fingerprint(target),
                architecture="LlamaForCausalLM",
                tokenizer_sha256="0" * 64,
                template_sha256="1" * 64,
            ),
            **changed,
        }
        head = new_head(make_head_config(**fields))
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in head.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(1 + 0.5 * noise if parameter.ndim == 1 else 0.3 * noise)
        size = head.config.draft_vocab_size
        head.set_draft_vocabulary(torch.randperm(VOCAB, generator=generator)[:size].sort().values)
        folder = tmp_path / "head"
        save_head(folder, head, dtype)
        return folder

    return make
