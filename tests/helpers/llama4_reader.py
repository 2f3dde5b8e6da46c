"""An EagleLlama4 checkpoint read and run as servers §1.2 says, a position at a time.

It takes config.json and the tensors of a file, and nothing of draftlab: the loader's permutation to
half-split pairs, rotation of those, norms without weights, chunks, temperatures.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def half_split(weight: Tensor, heads: int) -> Tensor:
    """vLLM's `permute_qk_weight_for_rotary`: pairs (2i, 2i + 1) become (i, i + d/2)."""
    rows, width = weight.shape
    return weight.view(heads, rows // heads // 2, 2, width).transpose(1, 2).reshape(rows, width)


def pairs(weight: Tensor, heads: int) -> Tensor:
    """The way back."""
    rows, width = weight.shape
    return weight.view(heads, 2, rows // heads // 2, width).transpose(1, 2).reshape(rows, width)


class Reader:
    """The drafter, with a cache of its own."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.c, self.w = config, {name: t.double() for name, t in tensors.items()}
        for name in list(self.w):
            for kind, key in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
                if kind in name:
                    self.w[name] = half_split(self.w[name], config[key])
        assert config["moe_layers"] == []
        assert config["interleave_moe_layer_step"] == 0
        assert config["yoco_global_kv_layer"] is config["yoco_local_kv_layer"] is None
        assert config["draft_vocab_size"] == config["vocab_size"]
        assert len(config["no_rope_layers"]) == config["num_hidden_layers"]
        self.cache: list[dict[int, tuple[Tensor, Tensor]]]
        self.cache = [{} for _ in range(config["num_hidden_layers"])]

    def norm(self, x: Tensor, name: str) -> Tensor:
        eps = self.c["rms_norm_eps"]
        return self.w[name + ".weight"] * x / torch.sqrt((x * x).mean() + eps)

    def heads(self, name: str, x: Tensor, position: int, *, ropes: bool) -> Tensor:
        d = self.c["head_dim"]
        y = (self.w[name + ".weight"] @ x).view(-1, d)
        if not ropes:
            return y
        theta = self.c["rope_parameters"]["rope_theta"]
        angle = [position * theta ** (-2 * i / d) for i in range(d // 2)]
        cos, sin = (torch.tensor([f(a) for a in angle]).double() for f in (math.cos, math.sin))
        one, two = y[:, : d // 2], y[:, d // 2 :]
        y = torch.cat([one * cos - two * sin, two * cos + one * sin], 1)
        if self.c["use_qk_norm"]:
            y = y / torch.sqrt((y * y).mean(1, keepdim=True) + self.c["rms_norm_eps"])
        return y

    def attention(self, number: int, x: Tensor, position: int) -> Tensor:
        c, name = self.c, f"layers.{number}.self_attn."
        ropes, cache = bool(c["no_rope_layers"][number]), self.cache[number]
        query, key, value = (
            self.heads(name + p, x, position, ropes=ropes and p != "v_proj")
            for p in ("q_proj", "k_proj", "v_proj")
        )
        cache[position], since = (key, value), 0
        if ropes and c["attention_chunk_size"]:
            since = position // c["attention_chunk_size"] * c["attention_chunk_size"]
        if not ropes and c["attn_temperature_tuning"]:
            floor = (position + 1) // c["floor_scale"]
            query = query * (math.log(floor + 1) * c["attn_scale"] + 1)
        group = c["num_attention_heads"] // c["num_key_value_heads"]
        visible, mixed = range(since, position + 1), []
        for n, q in enumerate(query):
            scores = torch.stack([cache[p][0][n // group] @ q for p in visible])
            share = (scores / math.sqrt(c["head_dim"])).softmax(0)
            values = torch.stack([cache[p][1][n // group] for p in visible])
            mixed.append(share @ values)
        return self.w[name + "o_proj.weight"] @ torch.cat(mixed)

    def step(self, token: int, state: Tensor, position: int) -> Tensor:
        """The post-norm state [H]: for logits, and for the next step."""
        x = self.w["fc.weight"] @ torch.cat([self.w["embed_tokens.weight"][token], state.double()])
        for n in range(self.c["num_hidden_layers"]):
            x = x + self.attention(n, self.norm(x, f"layers.{n}.input_layernorm"), position)
            y = self.norm(x, f"layers.{n}.post_attention_layernorm")
            gate, up, down = (
                self.w[f"layers.{n}.feed_forward.{p}_proj.weight"] for p in ("gate", "up", "down")
            )
            inner = gate @ y
            x = x + down @ (inner * torch.sigmoid(inner) * (up @ y))
        return self.norm(x, "norm")
