"""A fast decode path on CPUs: products with weights that are prepacked for oneDNN.

At a few tokens a row, half of the time of transformers' layers is spent in the calls between
products; and verifying K drafts in float32 costs K + 1 rows (see
`kernels/cpu_prepacked_linear.py`). For the architectures of `target_model/fused_decoder.py` the
same computation is written here with prepacked products, one for queries, keys and values, and
values that all layers share are computed once a step. The model does not change: weights are
copied, which doubles their memory.

Rounding differs from transformers' in the last bits, as it already does between one row and
several; `docs/benchmarks.md` says how often a token differs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftlab.kernels.cpu_prepacked_linear import (
    PrepackedLinear,
    PrepackedSwiGLU,
    RowNorm,
    why_no_prepacking,
)
from draftlab.kernels.paged_plan import Writes, attend_reads, write_rows
from draftlab.kernels.rope_write import rope_angles
from draftlab.target_model.fused_decoder import has_known_layers, window_of
from draftlab.target_model.model import HiddenStates, Target
from draftlab.target_model.paged_cache import PagedCache
from draftlab.target_model.path_check import check_decode_path


def rotation_factors(angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the factors [T, 1, head_dim] of `rotate` from cosines and sines [T, head_dim / 2]."""
    cos, sin = angles
    return torch.cat([cos, cos], -1)[:, None], torch.cat([-sin, sin], -1)[:, None]


def rotate(heads: Tensor, factors: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate heads [T, n, head_dim], half-split: x · cos + (second, first half) · ±sin."""
    cos, sin = factors
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, -1), sin)


@dataclass(frozen=True)
class _Layer:
    """A decoder layer's prepacked products and other parameters."""

    input_norm: RowNorm
    qkv: PrepackedLinear
    q_norm: RowNorm | None
    k_norm: RowNorm | None
    out: PrepackedLinear
    mlp_norm: RowNorm
    mlp: PrepackedSwiGLU
    scale: float
    window: int | None

    @property
    def num_bytes(self) -> int:
        """Memory of the prepacked copies."""
        return self.qkv.num_bytes + self.out.num_bytes + self.mlp.num_bytes


class PrepackedDecoder:
    """The decoder of a supported target on a CPU (see `prepacked_decoder`).

    Args:
        target: a target with `has_known_layers`. Later changes of its weights have no effect.
    """

    @torch.no_grad()
    def __init__(self, target: Target) -> None:
        self.embeddings, rope = target.parts.embeddings, target.decoder.rotary_emb
        self.inv_freq, self.scaling = rope.inv_freq.float(), float(rope.attention_scaling)
        attention = target.layers[0].self_attn
        self.head_dim: int = attention.head_dim
        self.num_kv_heads = attention.k_proj.out_features // self.head_dim
        self.num_heads = attention.q_proj.out_features // self.head_dim
        self.norm = _norm(target.norm)
        self.layers = [_pack_layer(layer, target.config) for layer in target.layers]
        self.lm_head = PrepackedLinear(target.parts.lm_head)

    @cached_property
    def num_bytes(self) -> int:
        """Memory of the prepacked copies."""
        return self.lm_head.num_bytes + sum(layer.num_bytes for layer in self.layers)

    @torch.inference_mode()
    def states(
        self,
        token_ids: Tensor,
        boundaries: tuple[int, ...] = (),
        *,
        positions: Tensor,
        cache: PagedCache,
    ) -> HiddenStates:
        """Run the decoder; see `DecodePath`."""
        x = F.embedding(token_ids.flatten(), self.embeddings)
        angles = rope_angles(positions.flatten(), self.inv_freq, self.scaling, x.dtype)
        factors = rotation_factors(angles)
        group = self.num_heads // self.num_kv_heads
        features = []
        for number, (layer, pool) in enumerate(zip(self.layers, cache.layers, strict=True)):
            if number in boundaries:
                features.append(x)
            if not pool.is_initialized:
                empty = x.new_empty(1, self.num_kv_heads, 0, self.head_dim)
                pool.lazy_initialization(empty, empty)
            query = self._write_cache(layer, x, factors, pool.keys, pool.values, cache.writes)
            attended = attend_reads(
                query.view(*token_ids.shape, *query.shape[1:]),
                pool.keys,
                pool.values,
                cache.reads(group, x.dtype, layer.window),
                scale=layer.scale,
            )
            x = layer.out.add_to(x, attended.view(x.shape[0], -1))
            x = layer.mlp.add_to(x, layer.mlp_norm(x))
        if len(self.layers) in boundaries:
            features.append(x)
        return HiddenStates.of(features, x.view(*token_ids.shape, -1))

    @torch.inference_mode()
    def logits(self, last: Tensor) -> Tensor:
        """Return logits [..., V] of last states [..., Ht], in their dtype (`Target`'s: float32)."""
        normed = self.norm(last.flatten(0, -2))
        return self.lm_head(normed).view(*last.shape[:-1], -1)

    def _write_cache(
        self,
        layer: _Layer,
        x: Tensor,
        factors: tuple[Tensor, Tensor],
        key_pool: Tensor,
        value_pool: Tensor,
        writes: Writes,
    ) -> Tensor:
        """Write keys and values to the pools; return rotated queries [T, heads, head_dim]."""
        heads = layer.qkv(layer.input_norm(x)).view(x.shape[0], -1, self.head_dim)
        rotated, value = heads[:, : -self.num_kv_heads], heads[:, -self.num_kv_heads :]
        if layer.q_norm is not None and layer.k_norm is not None:
            query, key = rotated[:, : self.num_heads], rotated[:, self.num_heads :]
            rotated = torch.cat([layer.q_norm(query), layer.k_norm(key)], 1)
        rotated = rotate(rotated, factors)
        write_rows(rotated[:, self.num_heads :], value, key_pool, value_pool, writes)
        return rotated[:, : self.num_heads]


def prepacked_decoder(target: Target) -> PrepackedDecoder | None:
    """Return the checked prepacked path of a target; None if `why_not_prepacked` has a reason."""
    if why_not_prepacked(target) is not None:
        return None
    if "prepacked" not in target.decode_paths:
        decoder = PrepackedDecoder(target)
        check_decode_path(target, decoder, "the prepacked decode path")
        target.decode_paths["prepacked"] = decoder
    return target.decode_paths["prepacked"]


def describe_products(target: Target, *, cpu_prepacked: bool) -> str:
    """Return a line that says with which products a target decodes on a CPU."""
    dtype = str(target.dtype).removeprefix("torch.")
    reason = why_not_prepacked(target) if cpu_prepacked else "packing is off"
    if reason is not None:
        return f"plain {dtype} products ({reason})"
    decoder = prepacked_decoder(target)
    size = f"{decoder.num_bytes / 1e6:,.0f} MB" if decoder else ""
    return f"{dtype} products packed for oneDNN (a copy of {size})"


def why_not_prepacked(target: Target) -> str | None:
    """Return why a target cannot decode on prepacked products; None if it can."""
    reason = why_no_prepacking(target.device, target.dtype)
    if reason is None and not has_known_layers(target):
        reason = f"layers of {type(target.decoder).__name__} run as transformers writes them"
    return reason


def _norm(module: Any) -> RowNorm:
    """Return the norm of a transformers RMSNorm module."""
    return RowNorm(module.weight, float(module.variance_epsilon))


def _pack_layer(layer: Any, config: Any) -> _Layer:
    """Read a layer's parameters and prepack its products."""
    attention, mlp = layer.self_attn, layer.mlp
    projections = [attention.q_proj, attention.k_proj, attention.v_proj]
    biases = [p.bias for p in projections if p.bias is not None]
    q_norm, k_norm = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    return _Layer(
        input_norm=_norm(layer.input_layernorm),
        qkv=PrepackedLinear(
            torch.cat([p.weight for p in projections]), torch.cat(biases) if biases else None
        ),
        q_norm=None if q_norm is None else _norm(q_norm),
        k_norm=None if k_norm is None else _norm(k_norm),
        out=PrepackedLinear(attention.o_proj.weight, attention.o_proj.bias),
        mlp_norm=_norm(layer.post_attention_layernorm),
        mlp=PrepackedSwiGLU(mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight),
        scale=float(attention.scaling),
        window=window_of(attention, config),
    )
