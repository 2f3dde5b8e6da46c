"""An exported folder read and run without draftlab: safetensors, JSON, CONTRACTS §1.3."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file


def read_and_run(
    folder: Path, tokens: torch.Tensor, features: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draft logits [S, D] and target ids [D] of a head with llama3 rope."""
    top, w = (
        json.loads((folder / "config.json").read_text()),
        load_file(folder / "model.safetensors"),
    )
    c = top["transformer_layer_config"]
    rope, size, d = c["rope_parameters"], len(tokens), c["head_dim"]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + c["rms_norm_eps"]).rsqrt() * w[name]

    frequency = rope["rope_theta"] ** -(torch.arange(0, d, 2) / d)
    wave, old = 2 * torch.pi / frequency, rope["original_max_position_embeddings"]
    slow, fast = rope["low_freq_factor"], rope["high_freq_factor"]
    mix = (old / wave - slow) / (fast - slow)
    between = (1 - mix) * frequency / rope["factor"] + mix * frequency
    frequency = torch.where(wave > old / slow, frequency / rope["factor"], frequency).where(
        (wave > old / slow) | (wave < old / fast), between
    )
    turn = torch.polar(torch.ones(size, d // 2), torch.arange(size)[:, None] * frequency)

    def heads(x: torch.Tensor, name: str, turned: bool) -> torch.Tensor:
        y = (x @ w[f"layers.0.self_attn.{name}_proj.weight"].T).view(size, -1, d)
        if not turned:
            return y
        y = torch.complex(y[..., : d // 2], y[..., d // 2 :]) * turn[:, None]
        return torch.cat([y.real, y.imag], -1)

    hidden = features @ w["fc.weight"].T
    normed = norm(hidden, "layers.0.hidden_norm.weight")
    x = torch.cat(
        [norm(w["embed_tokens.weight"][tokens], "layers.0.input_layernorm.weight"), normed], -1
    )
    group = c["num_attention_heads"] // c["num_key_value_heads"]
    query, key, value = heads(x, "q", True), heads(x, "k", True), heads(x, "v", False)
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(group, 1)) / d**0.5
    scores += torch.full((size, size), -torch.inf).triu(1)
    mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value.repeat_interleave(group, 1))
    hidden = (normed if top["norm_before_residual"] else hidden) + mixed.reshape(size, -1) @ w[
        "layers.0.self_attn.o_proj.weight"
    ].T
    y = norm(hidden, "layers.0.post_attention_layernorm.weight")
    up, gate = (y @ w[f"layers.0.mlp.{n}_proj.weight"].T for n in ("up", "gate"))
    hidden = hidden + (F.silu(gate) * up) @ w["layers.0.mlp.down_proj.weight"].T
    ids = torch.arange(top["draft_vocab_size"]) + w.get("d2t", torch.zeros(1, dtype=torch.int64))
    return norm(hidden, "norm.weight") @ w["lm_head.weight"].T, ids
