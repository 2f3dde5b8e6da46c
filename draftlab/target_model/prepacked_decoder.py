"""A target's decode pass on a CPU: products packed for oneDNN, and little between them.

At a few tokens a row, half of the time of transformers' layers is not multiplication but the calls
around it; and verifying K drafts in float32 pays for K + 1 rows (`kernels/packed_linear.py` says
why). For the architectures that `target_model/fused_decoder.py` knows the same computation is
written here with
packed products, one for queries, keys and values, and with what all layers share made once a step.
The model stays what it is: weights are copied, which costs their size once more.

Rounding differs from transformers' in the last bits, as it already does between one row and
several; `docs/benchmarks.md` says how often a token does.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from draftlab.kernels.packed_linear import PackedGated, PackedLinear, RowNorm, why_not_packed
from draftlab.kernels.paged_plan import Writes, attend_reads, write_rows
from draftlab.kernels.rope_write import rope_angles
from draftlab.target_model.fused_decoder import knows, window_of
from draftlab.target_model.model import States, Target
from draftlab.target_model.paged_cache import PagedCache
from draftlab.target_model.path_check import check_agreement

_packed: WeakKeyDictionary[Target, PackedDecoder] = WeakKeyDictionary()  # checked once


def rotation(angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Factors [T, 1, head_dim] of `rotate`, from cosines and sines [T, head_dim / 2]."""
    cos, sin = angles
    return torch.cat([cos, cos], -1)[:, None], torch.cat([-sin, sin], -1)[:, None]


def rotate(heads: Tensor, factors: tuple[Tensor, Tensor]) -> Tensor:
    """Heads [T, n, head_dim] turned, half-split layout: x · cos + (second, first half) · ±sin."""
    cos, sin = factors
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, -1), sin)


@dataclass(frozen=True)
class _Layer:
    """A decoder layer: packed products, and the parameters that are none."""

    input_norm: RowNorm
    qkv: PackedLinear
    q_norm: RowNorm | None
    k_norm: RowNorm | None
    out: PackedLinear
    mlp_norm: RowNorm
    mlp: PackedGated
    scale: float
    window: int | None

    @property
    def num_bytes(self) -> int:
        return self.qkv.num_bytes + self.out.num_bytes + self.mlp.num_bytes


class PackedDecoder:
    """The decoder of a listed target on a CPU; `packed_decoder` says whether there is one.

    Args:
        target: a loaded target that `fused.knows` knows. Changes of its weights are not seen.
    """

    @torch.no_grad()
    def __init__(self, target: Target) -> None:
        # Not the target itself: `_packed` would then keep it alive.
        self.embeddings, rope = target.parts.embeddings, target.decoder.rotary_emb
        self.inv_freq, self.scaling = rope.inv_freq.float(), float(rope.attention_scaling)
        attention = target.layers[0].self_attn
        self.head_dim: int = attention.head_dim
        self.num_kv_heads = attention.k_proj.out_features // self.head_dim
        self.num_heads = attention.q_proj.out_features // self.head_dim
        self.norm = _norm(target.norm)
        self.layers = [_pack_layer(layer, target.config) for layer in target.layers]
        self.lm_head = PackedLinear(target.parts.lm_head)

    @cached_property
    def num_bytes(self) -> int:
        """Memory of the packed copies."""
        return self.lm_head.num_bytes + sum(layer.num_bytes for layer in self.layers)

    @torch.inference_mode()
    def states(
        self,
        token_ids: Tensor,
        boundaries: tuple[int, ...] = (),
        *,
        positions: Tensor,
        cache: PagedCache,
    ) -> States:
        """`Target.states` with a `PagedCache` aimed at these tokens.

        Args:
            token_ids: int64 [B, M].
            boundaries: whose states become the features, ascending.
            positions: int64 [B, M], −1 for padding (its states mean nothing).
            cache: where earlier keys are and new ones go.
        """
        x = F.embedding(token_ids.flatten(), self.embeddings)
        angles = rope_angles(positions.flatten(), self.inv_freq, self.scaling, x.dtype)
        factors = rotation(angles)
        group = self.num_heads // self.num_kv_heads
        taken = []
        for number, (layer, pool) in enumerate(zip(self.layers, cache.layers, strict=True)):
            if number in boundaries:
                taken.append(x)
            if not pool.is_initialized:
                empty = x.new_empty(1, self.num_kv_heads, 0, self.head_dim)
                pool.lazy_initialization(empty, empty)
            query = self._write(layer, x, factors, pool.keys, pool.values, cache.writes)
            attended = attend_reads(
                query.view(*token_ids.shape, *query.shape[1:]),
                pool.keys,
                pool.values,
                cache.reads(group, x.dtype, layer.window),
                scale=layer.scale,
            )
            x = layer.out.added_to(x, attended.view(x.shape[0], -1))
            x = layer.mlp.added_to(x, layer.mlp_norm(x))
        if len(self.layers) in boundaries:
            taken.append(x)
        last = x.view(*token_ids.shape, -1)
        features = torch.cat(taken, -1).view(*token_ids.shape, -1) if taken else last[..., :0]
        return States(features, last)

    @torch.inference_mode()
    def logits(self, last: Tensor) -> Tensor:
        """Logits [..., V] of last states [..., Ht], in their dtype: `Target.logits` widens them."""
        flat = self.norm(last.flatten(0, -2))
        return self.lm_head(flat).view(*last.shape[:-1], -1)

    def _write(
        self,
        layer: _Layer,
        x: Tensor,
        factors: tuple[Tensor, Tensor],
        key_pool: Tensor,
        value_pool: Tensor,
        writes: Writes,
    ) -> Tensor:
        """Rotated queries [T, heads, head_dim]; keys and values enter the pools."""
        heads = layer.qkv(layer.input_norm(x)).view(x.shape[0], -1, self.head_dim)
        turned, value = heads[:, : -self.num_kv_heads], heads[:, -self.num_kv_heads :]
        if layer.q_norm is not None and layer.k_norm is not None:
            query, key = turned[:, : self.num_heads], turned[:, self.num_heads :]
            turned = torch.cat([layer.q_norm(query), layer.k_norm(key)], 1)
        turned = rotate(turned, factors)
        write_rows(turned[:, self.num_heads :], value, key_pool, value_pool, writes)
        return turned[:, : self.num_heads]


def packed_decoder(target: Target) -> PackedDecoder | None:
    """The packed path of a target, checked; None where `why_not` gives a reason."""
    if why_not(target) is not None:
        return None
    if target not in _packed:
        decoder = PackedDecoder(target)
        check_agreement(target, decoder, "the packed decode path")
        _packed[target] = decoder
    return _packed[target]


def products(target: Target, *, packed: bool) -> str:
    """Which products a target on a CPU decodes with, as a line for people."""
    dtype = str(target.dtype).removeprefix("torch.")
    reason = why_not(target) if packed else "packing is off"
    if reason is not None:
        return f"plain {dtype} products ({reason})"
    decoder = packed_decoder(target)
    size = f"{decoder.num_bytes / 1e6:,.0f} MB" if decoder else ""
    return f"{dtype} products packed for oneDNN (a copy of {size})"


def why_not(target: Target) -> str | None:
    """What keeps a target from decoding on packed products; None: nothing does."""
    reason = why_not_packed(target.device, target.dtype)
    if reason is None and not knows(target):
        reason = f"layers of {type(target.decoder).__name__} run as transformers writes them"
    return reason


def _norm(module: Any) -> RowNorm:
    return RowNorm(module.weight, float(module.variance_epsilon))


def _pack_layer(layer: Any, config: Any) -> _Layer:
    """Reads a layer's parameters and packs its products."""
    attention, mlp = layer.self_attn, layer.mlp
    projections = [attention.q_proj, attention.k_proj, attention.v_proj]
    biases = [p.bias for p in projections if p.bias is not None]
    q_norm, k_norm = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    return _Layer(
        input_norm=_norm(layer.input_layernorm),
        qkv=PackedLinear(
            torch.cat([p.weight for p in projections]), torch.cat(biases) if biases else None
        ),
        q_norm=None if q_norm is None else _norm(q_norm),
        k_norm=None if k_norm is None else _norm(k_norm),
        out=PackedLinear(attention.o_proj.weight, attention.o_proj.bias),
        mlp_norm=_norm(layer.post_attention_layernorm),
        mlp=PackedGated(mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight),
        scale=float(attention.scaling),
        window=window_of(attention, config),
    )
