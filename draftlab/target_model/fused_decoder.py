"""A fast decode path on CUDA: six kernels a layer, for architectures whose layers are known.

transformers runs a decoder layer as about twenty kernels; at one token a row, launching and
draining them takes as long as reading the weights. For the layers in `known_layers.py` the same
computation is written here with the kernels of `kernels/`: qkv, rotation and cache write,
attention, output product plus residual, gated product, down product plus residual; the last two
also begin the next norm. Prompts use the same path: their products are cuBLAS's, and few calls a
layer keep the GPU busy. Other targets run through transformers (`fused_decoder` returns None).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from draftlab.kernels.compile_ahead import is_fake
from draftlab.kernels.linear import DeferredNorm, linear, linear_then_norm, swiglu_linear
from draftlab.kernels.paged_attention import attend_paged
from draftlab.kernels.rope_write import rope_angles, rope_write
from draftlab.target_model.hidden_states import HiddenStates
from draftlab.target_model.known_layers import (
    LayerWeights,
    check_decode_path,
    has_known_layers,
    window_of,
)
from draftlab.target_model.model import Target
from draftlab.target_model.paged_cache import PagedCache

Pair = tuple[Tensor, Tensor]


class FusedLayer:
    """A Llama-style decoder layer in fused kernels.

    Args:
        weights: of the layer, whose storage is shared.
        eps: of its norms.
        scale, window: of attention, as in `attend_paged`.
        next_norm: weight of the norm that follows the layer; None: no norm does.
    """

    def __init__(
        self,
        weights: LayerWeights,
        eps: float,
        scale: float,
        *,
        window: int | None = None,
        next_norm: Tensor | None = None,
    ) -> None:
        self.weights, self.eps, self.next_norm = weights, eps, next_norm
        self.scale, self.window = scale, window

    def kind(self) -> tuple[object, ...]:
        """Return what decides which kernels the layer launches."""
        shapes = [None if x is None else x.shape for x in vars(self.weights).values()]
        return self.window, self.next_norm is None, *shapes

    def write_cache(
        self,
        x: Tensor | DeferredNorm,
        angles: Pair,
        pool: Pair,
        slots: Tensor,
        *,
        norm_weight: Tensor | None = None,
    ) -> Tensor:
        """Write keys and values to the pool; return rotated queries [T, heads, head_dim].

        Args:
            x: [T, Kin], which `norm_weight` norms; None: it is normed.
            angles: `rope_angles` of the T positions.
            pool: keys and values [P, S, kv heads, head_dim].
            slots: int64 [T]; −1 writes nothing.
        """
        w = self.weights
        qkv = linear(x, w.qkv, bias=w.qkv_bias, norm_weight=norm_weight, eps=self.eps)
        return rope_write(qkv, angles, *pool, slots, q_norm=w.q_norm, k_norm=w.k_norm, eps=self.eps)

    def output(
        self,
        query: Tensor,
        residual: Tensor,
        pool: Pair,
        block_table: Tensor,
        positions: Tensor,
        last_seen: Tensor | None = None,
    ) -> tuple[Tensor, DeferredNorm | None]:
        """Return the output [T, H], and its norm if one follows, from queries [B, M, heads,
        head_dim], T = B · M, and the residual [T, H]; the rest is `attend_paged`'s.
        """
        w = self.weights
        attended = attend_paged(
            query,
            *pool,
            block_table,
            positions,
            scale=self.scale,
            window=self.window,
            last_seen=last_seen,
            prefetch_weight=w.out,
        )
        y, normed = linear_then_norm(
            attended.flatten(2).flatten(0, 1),
            w.out,
            w.mlp_norm,
            self.eps,
            residual=residual,
            bias=w.out_bias,
        )
        inner = swiglu_linear(normed, w.gate, w.up)
        if self.next_norm is None:
            return linear(inner, w.down, residual=y), None
        return linear_then_norm(inner, w.down, self.next_norm, self.eps, residual=y)


class KnownDecoder(ABC):
    """The decoder of a target with known layers (see `has_known_layers`); a `DecodePath`."""

    def __init__(self, target: Target) -> None:
        self.embed, rope = target.model.get_input_embeddings(), target.decoder.rotary_emb
        self.inv_freq, self.scaling = rope.inv_freq.float(), float(rope.attention_scaling)
        self.eps = float(target.norm.variance_epsilon)
        attention = target.layers[0].self_attn
        self.head_dim: int = attention.head_dim
        self.num_kv_heads = attention.k_proj.out_features // self.head_dim

    @abstractmethod
    def _run(
        self, x: Tensor, angles: Pair, shape: tuple[int, int], cache: PagedCache
    ) -> Iterator[Tensor]:
        """Yield each layer's input [T, H] and the last state, from embeddings of tokens [B, M]."""

    @torch.inference_mode()
    def states(
        self,
        token_ids: Tensor,
        boundaries: tuple[int, ...] = (),
        *,
        positions: Tensor,
        cache: PagedCache,
    ) -> HiddenStates:
        """Run the decoder without synchronising with the host; see `DecodePath`."""
        x = self.embed(token_ids.flatten())  # which reads images, too
        angles = rope_angles(positions.flatten(), self.inv_freq, self.scaling, x.dtype)
        empty = x.new_empty(1, self.num_kv_heads, 0, self.head_dim)
        for pool in cache.layers:
            if not pool.is_initialized:
                pool.lazy_initialization(empty, empty)
        features = []
        for number, state in enumerate(self._run(x, angles, token_ids.shape, cache)):
            if number in boundaries:
                features.append(state)
        return HiddenStates.of(features, state.view(*token_ids.shape, -1))


class FusedDecoder(KnownDecoder):
    """The decoder in fused kernels (see `fused_decoder`); on a CPU their references run.

    Queries, keys and values become one product: their weights move into one tensor, of which the
    modules keep views, so neither memory nor the state dict changes.
    """

    @torch.no_grad()
    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.lm_head, self.norm = target.parts.lm_head, target.norm.weight
        weights = [LayerWeights(layer, _stack_in_place) for layer in target.layers]
        next_norms = [*(w.input_norm for w in weights[1:]), self.norm]
        self.layers = [
            FusedLayer(
                w,
                self.eps,
                float(layer.self_attn.scaling),
                window=window_of(layer.self_attn, target.config),
                next_norm=next_norm,
            )
            for layer, w, next_norm in zip(target.layers, weights, next_norms, strict=True)
        ]

    def _run(
        self, x: Tensor, angles: Pair, shape: tuple[int, int], cache: PagedCache
    ) -> Iterator[Tensor]:
        slots, tables = cache.slot_mapping.flatten(), (cache.block_table, cache.positions)
        normed, norm_weight = x, self.layers[0].weights.input_norm
        launched = set()
        for layer, cached in zip(self.layers, cache.layers, strict=True):
            yield x
            if is_fake():  # kernels are compiled ahead: one layer of each kind asks for all
                if (kind := (norm_weight is None, layer.kind())) in launched:
                    continue
                launched.add(kind)
            pool = cached.keys, cached.values
            query = layer.write_cache(normed, angles, pool, slots, norm_weight=norm_weight)
            query = query.view(*shape, *query.shape[1:])
            output = layer.output(query, x, pool, *tables)
            (x, normed), norm_weight = output, None
        yield x

    @torch.inference_mode()
    def logits(self, last: Tensor) -> Tensor:
        """Return logits [..., V] of last states [..., Ht], in their dtype (`Target`'s: float32)."""
        rows = last.flatten(0, -2)
        logits = linear(rows, self.lm_head, norm_weight=self.norm, eps=self.eps)
        return logits.view(*last.shape[:-1], -1)


def fused_decoder(target: Target) -> FusedDecoder | None:
    """Return the checked fused path of a target; None off CUDA and for layers that are not known
    (`has_known_layers`), which transformers runs.
    """
    if target.device.type != "cuda":
        return None
    if "fused" not in target.decode_paths:
        target.decode_paths["fused"] = None
        if has_known_layers(target):
            decoder = FusedDecoder(target)
            check_decode_path(target, decoder, "the fused decode path")
            target.decode_paths["fused"] = decoder
    return target.decode_paths["fused"]


def _stack_in_place(parameters: list[nn.Parameter]) -> Tensor:
    """Stack parameters into one tensor, of which each becomes a view; done once a model."""
    stacked = torch.cat([p.detach() for p in parameters])
    views = stacked.split([len(p) for p in parameters])
    for parameter, view in zip(parameters, views, strict=True):
        parameter.data = view
    return stacked
