"""Files and config.json of P-EAGLE heads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from draftlab.heads.folder import load_head, native_config, save_head
from draftlab.heads.peagle import PeagleHead
from tests.helpers.head_toys import PEAGLE, make_config, make_head

MASK, FEATURES = 7, 80


def test_the_mask_tokens_embedding_is_a_row_of_the_stored_table(tmp_path: Path) -> None:
    head = make_head(**PEAGLE, qk_norm=True).float()
    assert isinstance(head, PeagleHead)
    save_head(tmp_path, head, torch.float32)
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["mask_hidden"].shape == (1, FEATURES)
    assert "mask_embedding" not in tensors
    table = tensors["embed_tokens.weight"]
    assert torch.equal(table[MASK], head.mask_embedding)
    rest = torch.arange(50) != MASK
    assert torch.equal(table[rest], head.embed_tokens.weight[rest])
    # The first layer reads two vectors, the second one; only the first norms a hidden state apart.
    assert tensors["layers.0.self_attn.q_proj.weight"].shape == (48, 48)
    assert tensors["layers.1.self_attn.q_proj.weight"].shape == (48, 24)
    assert tensors["layers.1.self_attn.k_norm.weight"].shape == (8,)
    assert "layers.0.hidden_norm.weight" in tensors
    assert "layers.1.hidden_norm.weight" not in tensors

    loaded = load_head(tmp_path, embeddings=None, dtype=torch.float32, device="cpu")
    tokens = torch.arange(50).view(5, 10)
    assert torch.equal(loaded.embed(tokens), head.embed(tokens))
    assert not torch.equal(head.embed(tokens)[0, MASK], head.embed_tokens.weight[MASK])
    assert torch.equal(loaded.mask_state(), head.mask_state())


@pytest.mark.parametrize("qk_norm", [False, True])
def test_config_json_has_the_mask_token_under_three_names(qk_norm: bool) -> None:
    config = native_config(make_config(**PEAGLE, qk_norm=qk_norm), "bfloat16")
    names = ("mask_token_id", "ptd_token_id", "pard_token")
    assert [config[name] for name in names] == [MASK] * 3
    assert config["num_hidden_layers"] == 2
    architecture = "Eagle3Qwen3ForCausalLM" if qk_norm else "LlamaForCausalLMEagle3"
    assert config["architectures"] == [architecture]
    assert config["model_type"] == ("qwen3" if qk_norm else "llama")
    assert not set(names) & native_config(make_config(), "bfloat16").keys()
