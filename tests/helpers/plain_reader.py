"""An independent reader of exports: safetensors and JSON as in servers §1.3, without draftlab."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file


def read_and_run(
    folder: Path,
    tokens: torch.Tensor,
    features: torch.Tensor,
    embeddings: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return draft logits [S, D] and target ids [D] of a head with llama3 RoPE.

    Args:
        embeddings: the target's [V, H], for layouts without them.
    """
    top, w = json.loads((folder / "config.json").read_text()), {"embed_tokens.weight": embeddings}
    for file in folder.glob("*.safetensors"):
        w |= {n.replace("midlayer.", "layers.0."): t for n, t in load_file(file).items()}
    c = top.get("transformer_layer_config", top)
    rope, size, d = c["rope_parameters"], len(tokens), c["head_dim"]
    before = top["norm_before_residual"]

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

    group, causal = c["num_attention_heads"] // c["num_key_value_heads"], torch.ones(size, size)

    def attend(x: torch.Tensor, layer: str) -> torch.Tensor:
        q, k, v = ((x @ w[f"{layer}self_attn.{n}_proj.weight"].T).view(size, -1, d) for n in "qkv")
        if c["model_type"] == "qwen3":
            q, k = (norm(y, f"{layer}self_attn.{n}_norm.weight") for n, y in (("q", q), ("k", k)))
        q, k = (torch.complex(y[..., : d // 2], y[..., d // 2 :]) * turn[:, None] for y in (q, k))
        q, k = (torch.cat([y.real, y.imag], -1) for y in (q, k))
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) / d**0.5
        shares = scores.masked_fill(causal.triu(1) > 0, -torch.inf).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", shares, v.repeat_interleave(group, 1))
        return mixed.reshape(size, -1) @ w[f"{layer}self_attn.o_proj.weight"].T

    hidden = features @ w["fc.weight"].T
    for number in range(c["num_hidden_layers"]):
        layer = f"layers.{number}."
        if number == 0:
            normed = norm(hidden, f"{layer}hidden_norm.weight")
            x = norm(w["embed_tokens.weight"][tokens], f"{layer}input_layernorm.weight")
            x, hidden = torch.cat([x, normed], -1), normed if before else hidden
        else:
            x = norm(hidden, f"{layer}input_layernorm.weight")
        hidden = hidden + attend(x, layer)
        y = norm(hidden, f"{layer}post_attention_layernorm.weight")
        up, gate = (y @ w[f"{layer}mlp.{n}_proj.weight"].T for n in ("up", "gate"))
        hidden = hidden + (F.silu(gate) * up) @ w[f"{layer}mlp.down_proj.weight"].T
    ids = torch.arange(top["draft_vocab_size"]) + w.get("d2t", torch.zeros(1, dtype=torch.int64))
    return norm(hidden, "norm.weight") @ w["lm_head.weight"].T, ids
