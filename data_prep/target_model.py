"""The embedded target as it is trained: a hand-written Llama.

Mathematics and tensor names are transformers', which reads the result. Written by hand because a
training step of an 11 M model is all overhead: fused projections, one compiled block used twelve
times. `train_target.py` compares the two before it trains.

Shapes: B rows, T tokens a row, H hidden, D head size.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save
from torch import Tensor, nn
from transformers import LlamaConfig


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return RMSNorm over the last dimension, computed in float32, in x's dtype."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * weight).to(x.dtype)


class Block(nn.Module):
    """One decoder layer; float32 master weights, activations in x's dtype."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        h, i, d = config.hidden_size, config.intermediate_size, config.head_dim
        kv = config.num_key_value_heads * d
        self.head_dim, self.eps = d, config.rms_norm_eps
        small = 0.02 / math.sqrt(2 * config.num_hidden_layers)
        self.q, self.k, self.v = (_matrix(n, h, 0.02) for n in (h, kv, kv))
        self.o, self.down = _matrix(h, h, small), _matrix(h, i, small)
        self.gate, self.up = _matrix(i, h, 0.02), _matrix(i, h, 0.02)
        self.norm1, self.norm2 = nn.Parameter(torch.ones(h)), nn.Parameter(torch.ones(h))

    def forward(self, x_BTH: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        b, t, h = x_BTH.shape
        y = rms_norm(x_BTH, self.norm1, self.eps)
        y = F.linear(y, torch.cat([self.q, self.k, self.v]).to(y.dtype))
        y = y.view(b, t, -1, self.head_dim).transpose(1, 2)
        heads = h // self.head_dim
        kv_heads = (y.shape[1] - heads) // 2
        rotated, v = y.split([heads + kv_heads, kv_heads], 1)
        left, right = rotated.chunk(2, -1)
        rotated = rotated * cos_TD + torch.cat([-right, left], -1) * sin_TD
        q, k = rotated.split([heads, kv_heads], 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x_BTH = x_BTH + F.linear(y.transpose(1, 2).reshape(b, t, h), self.o.to(y.dtype))
        y = rms_norm(x_BTH, self.norm2, self.eps)
        gate, up = F.linear(y, torch.cat([self.gate, self.up]).to(y.dtype)).chunk(2, -1)
        return x_BTH + F.linear(F.silu(gate) * up, self.down.to(y.dtype))


def _matrix(rows: int, columns: int, std: float) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, columns) * std)


class Model(nn.Module):
    """The decoder; `forward` returns the summed loss over the labels that are not -100."""

    def __init__(self, config: LlamaConfig, length: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        self.embed = _matrix(config.vocab_size, config.hidden_size, 0.02)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.Parameter(torch.ones(config.hidden_size))
        theta = config.rope_parameters["rope_theta"]
        inverse = theta ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
        angles = torch.outer(torch.arange(length), inverse).repeat(1, 2)
        self.register_buffer("cos", angles.cos().to(dtype))
        self.register_buffer("sin", angles.sin().to(dtype))
        self.loss = summed_loss

    def forward(self, ids_BT: Tensor, labels_BT: Tensor) -> Tensor:
        x = F.embedding(ids_BT, self.embed).to(self.dtype)
        t = ids_BT.shape[1]
        for block in self.blocks:
            x = block(x, self.cos[:t], self.sin[:t])
        return self.loss(x, self.norm, self.embed, labels_BT, self.config.rms_norm_eps)

    def compile_parts(self) -> None:
        """Compile the block (once, all twelve share it) and the loss."""
        for block in self.blocks:
            block.compile(dynamic=False)
        self.loss = torch.compile(summed_loss, dynamic=False)

    def tensors(self) -> dict[str, Tensor]:
        """Return weights under transformers' names, bfloat16, on the CPU, the output tied."""
        return {
            k: v.detach().to(torch.bfloat16).cpu().contiguous() for k, v in self._named().items()
        }

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor]) -> None:
        """Load what `tensors` returned; the names must agree."""
        named = self._named()
        if named.keys() != tensors.keys():
            raise ValueError(f"tensor names differ: {sorted(named.keys() ^ tensors.keys())}")
        for name, parameter in named.items():
            parameter.copy_(tensors[name])

    def _named(self) -> dict[str, nn.Parameter]:
        names = {"model.embed_tokens.weight": self.embed, "model.norm.weight": self.norm}
        inner = {
            "q": "self_attn.q_proj",
            "k": "self_attn.k_proj",
            "v": "self_attn.v_proj",
            "o": "self_attn.o_proj",
            "gate": "mlp.gate_proj",
            "up": "mlp.up_proj",
            "down": "mlp.down_proj",
            "norm1": "input_layernorm",
            "norm2": "post_attention_layernorm",
        }
        for i, block in enumerate(self.blocks):
            names |= {
                f"model.layers.{i}.{theirs}.weight": getattr(block, ours)
                for ours, theirs in inner.items()
            }
        return names


def summed_loss(x: Tensor, norm: Tensor, embed: Tensor, labels: Tensor, eps: float) -> Tensor:
    logits = F.linear(rms_norm(x, norm, eps), embed.to(x.dtype))
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")


def save_model(model: Model, template: Path, folder: Path) -> bytes:
    """Write a folder that transformers loads: weights of `model`, files of `template`."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in template.iterdir():
        if file.suffix in (".json", ".jinja"):
            shutil.copy(file, folder)
    model.config.save_pretrained(folder)
    data = save(model.tensors(), metadata={"format": "pt"})
    (folder / "model.safetensors").write_bytes(data)
    return data
