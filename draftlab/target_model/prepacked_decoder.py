"""A fast decode path on CPUs: products with weights that are prepacked for oneDNN.

At a few tokens a row, half of the time of transformers' layers is spent in the calls between
products; and verifying K drafts in float32 costs K + 1 rows (see
`kernels/cpu_prepacked_linear.py`). For the architectures of `target_model/known_layers.py` the
same computation is written here with prepacked products, one for queries, keys and values, and
values that all layers share are computed once a step. The model does not change: weights are
copied, which doubles their memory. Rounding differs from transformers' in the last bits, as it does
between one row and several.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from draftlab.kernels.cpu_prepacked_linear import (
    PrepackedLinear,
    PrepackedSwiGLU,
    RowNorm,
    why_no_prepacking,
)
from draftlab.kernels.paged_attention.plan import Read, Writes, attend_reads, write_rows
from draftlab.target_model.fused_decoder import KnownDecoder, Pair
from draftlab.target_model.known_layers import (
    LayerWeights,
    check_decode_path,
    has_known_layers,
    window_of,
)
from draftlab.target_model.model import Target
from draftlab.target_model.paged_cache import PagedCache


def rotation_factors(angles: Pair) -> Pair:
    """Return the factors [T, 1, head_dim] of `rotate` from cosines and sines [T, head_dim / 2]."""
    cos, sin = angles
    return torch.cat([cos, cos], -1)[:, None], torch.cat([-sin, sin], -1)[:, None]


def rotate(heads: Tensor, factors: Pair) -> Tensor:
    """Rotate heads [T, n, head_dim], half-split: x · cos + (second, first half) · ±sin."""
    cos, sin = factors
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, -1), sin)


class PrepackedLayer:
    """A Llama-style decoder layer with prepacked products; the arguments are `FusedLayer`'s."""

    def __init__(
        self, weights: LayerWeights, eps: float, scale: float, window: int | None = None
    ) -> None:
        w, self.scale, self.window = weights, scale, window
        self.input_norm, self.q_norm, self.k_norm, self.mlp_norm = (
            None if norm is None else RowNorm(norm, eps)
            for norm in (w.input_norm, w.q_norm, w.k_norm, w.mlp_norm)
        )
        self.qkv = PrepackedLinear(w.qkv, w.qkv_bias)
        self.out = PrepackedLinear(w.out, w.out_bias)
        self.mlp = PrepackedSwiGLU(w.gate, w.up, w.down)

    @property
    def num_bytes(self) -> int:
        """Memory of the prepacked copies."""
        return self.qkv.num_bytes + self.out.num_bytes + self.mlp.num_bytes

    def write_cache(self, x: Tensor, factors: Pair, pool: Pair, writes: Writes) -> Tensor:
        """Do `FusedLayer.write_cache` by `rotation_factors` and a plan of writes; x is normed."""
        num_kv_heads, head_dim = pool[0].shape[2:]
        heads = self.qkv(x).view(len(x), -1, head_dim)
        rotated, value = heads[:, :-num_kv_heads], heads[:, -num_kv_heads:]
        if self.q_norm is not None and self.k_norm is not None:
            query, key = rotated[:, :-num_kv_heads], rotated[:, -num_kv_heads:]
            rotated = torch.cat([self.q_norm(query), self.k_norm(key)], 1)
        rotated = rotate(rotated, factors)
        write_rows(rotated[:, -num_kv_heads:], value, *pool, writes)
        return rotated[:, :-num_kv_heads]

    def output(self, query: Tensor, residual: Tensor, pool: Pair, reads: list[Read]) -> Tensor:
        """Return the output [T, H] as `FusedLayer.output`, by a plan of reads."""
        attended = attend_reads(query, *pool, reads, scale=self.scale)
        x = self.out.add_to(residual, attended.view(len(residual), -1))
        return self.mlp.add_to(x, self.mlp_norm(x))


class PrepackedDecoder(KnownDecoder):
    """The decoder on copies of the target's weights (see `prepacked_decoder`)."""

    @torch.no_grad()
    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.norm = RowNorm(target.norm.weight, self.eps)
        self.layers = []
        for layer in target.layers:
            scale = float(layer.self_attn.scaling)
            window = window_of(layer.self_attn, target.config)
            self.layers.append(PrepackedLayer(LayerWeights(layer), self.eps, scale, window))
        self.lm_head = PrepackedLinear(target.parts.lm_head)

    @cached_property
    def num_bytes(self) -> int:
        """Memory of the prepacked copies."""
        return self.lm_head.num_bytes + sum(layer.num_bytes for layer in self.layers)

    def _run(
        self, x: Tensor, angles: Pair, shape: tuple[int, int], cache: PagedCache
    ) -> Iterator[Tensor]:
        factors = rotation_factors(angles)
        for layer, cached in zip(self.layers, cache.layers, strict=True):
            yield x
            pool = cached.keys, cached.values
            query = layer.write_cache(layer.input_norm(x), factors, pool, cache.writes)
            reads = cache.reads(query.shape[1] // self.num_kv_heads, x.dtype, layer.window)
            x = layer.output(query.view(*shape, *query.shape[1:]), x, pool, reads)
        yield x

    @torch.inference_mode()
    def logits(self, last: Tensor) -> Tensor:
        """Return logits [..., V] of last states [..., Ht], in their dtype (`Target`'s: float32)."""
        normed = self.norm(last.flatten(0, -2))
        return self.lm_head(normed).view(*last.shape[:-1], -1)


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
        return f"{dtype} weights as they are ({reason})"
    decoder = prepacked_decoder(target)
    size = f"{decoder.num_bytes / 1e6:,.0f} MB" if decoder else ""
    return f"{dtype} weights packed for this CPU (a copy of {size})"


def why_not_prepacked(target: Target) -> str | None:
    """Return why a target cannot decode on prepacked products; None if it can."""
    reason = why_no_prepacking(target.device, target.dtype)
    if reason is None and not has_known_layers(target):
        reason = f"layers of {type(target.decoder).__name__} run as transformers writes them"
    return reason
