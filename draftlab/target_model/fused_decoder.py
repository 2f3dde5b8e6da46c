"""A fast decode path on CUDA: six kernels a layer, for architectures whose layers are known.

transformers runs a decoder layer as about twenty kernels; at one token a row, launching and
draining them takes as long as reading the weights. For the layers in `_LAYERS` the same computation
is written here with the kernels of `kernels/`: qkv, rotation and cache write, attention, output
product plus residual, gated product, down product plus residual; the last two also begin the next
norm. Prompts use the same path: their products are cuBLAS's, and few calls a layer keep the GPU
busy. Other targets run through transformers (`fused_decoder` returns None).

`check_decode_path` compares both when a target is loaded, so a change in a release of transformers
shows as an error and not as lower acceptance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftlab.kernels.linear import linear, linear_then_norm, swiglu_linear
from draftlab.kernels.paged_attention import attend_paged
from draftlab.kernels.rope_write import rope_angles, rope_write
from draftlab.target_model.model import HiddenStates, Target
from draftlab.target_model.paged_cache import PagedCache
from draftlab.target_model.path_check import check_decode_path

_LAYERS = {"Llama", "Mistral", "Qwen2", "Qwen3"}
_ROPE_TYPES = {"default", "linear", "llama3", "yarn"}  # frequencies do not depend on the input


@dataclass(frozen=True)
class _Layer:
    """A decoder layer's parameters, which share the loaded modules' storage."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    scale: float
    window: int | None


class FusedDecoder:
    """The decoder of a supported target (see `fused_decoder`).

    Queries, keys and values become one product: their weights move into one tensor, of which the
    modules keep views, so neither memory nor the state dict changes.

    Args:
        target: a target with `has_known_layers`; on a CPU the kernels' references run.
    """

    @torch.no_grad()
    def __init__(self, target: Target) -> None:
        self.parts = target.parts
        rope = target.decoder.rotary_emb
        self.inv_freq, self.scaling = rope.inv_freq.float(), float(rope.attention_scaling)
        self.eps = float(target.norm.variance_epsilon)
        self.layers = [_read_layer(layer, target.config) for layer in target.layers]
        self.norms = [*(layer.input_norm for layer in self.layers), target.norm.weight]
        attention = target.layers[0].self_attn
        self.head_dim: int = attention.head_dim
        self.num_kv_heads = attention.k_proj.out_features // self.head_dim

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
        x = F.embedding(token_ids.flatten(), self.parts.embeddings)
        angles = rope_angles(positions.flatten(), self.inv_freq, self.scaling, x.dtype)
        slots = cache.slot_mapping.flatten()
        features, normed = [], None
        for number, (layer, pool) in enumerate(zip(self.layers, cache.layers, strict=True)):
            if number in boundaries:
                features.append(x)
            if not pool.is_initialized:
                empty = x.new_empty(1, self.num_kv_heads, 0, self.head_dim)
                pool.lazy_initialization(empty, empty)
            norm = {} if normed else {"norm_weight": layer.input_norm, "eps": self.eps}
            qkv = linear(normed or x, layer.qkv, bias=layer.qkv_bias, **norm)
            query = rope_write(
                qkv,
                angles,
                pool.keys,
                pool.values,
                slots,
                q_norm=layer.q_norm,
                k_norm=layer.k_norm,
                eps=self.eps,
            )
            attended = attend_paged(
                query.view(*token_ids.shape, *query.shape[1:]),
                pool.keys,
                pool.values,
                cache.block_table,
                cache.positions,
                scale=layer.scale,
                window=layer.window,
                prefetch_weight=layer.out,
            ).view(len(x), -1)
            x, normed = linear_then_norm(
                attended, layer.out, layer.mlp_norm, self.eps, residual=x, bias=layer.out_bias
            )
            inner = swiglu_linear(normed, layer.gate, layer.up)
            x, normed = linear_then_norm(
                inner, layer.down, self.norms[number + 1], self.eps, residual=x
            )
        if len(self.layers) in boundaries:
            features.append(x)
        return HiddenStates.of(features, x.view(*token_ids.shape, -1))

    @torch.inference_mode()
    def logits(self, last: Tensor) -> Tensor:
        """Return logits [..., V] of last states [..., Ht], in their dtype (`Target`'s: float32)."""
        norm, rows = self.norms[-1], last.flatten(0, -2)
        logits = linear(rows, self.parts.lm_head, norm_weight=norm, eps=self.eps)
        return logits.view(*last.shape[:-1], -1)


def fused_decoder(target: Target) -> FusedDecoder | None:
    """Return the checked fused path of a target; None if the target runs through transformers.

    That is the case off CUDA, in 32 bit, for an architecture that is not listed, and for layers
    with other modules, parameters or hooks or with input-dependent rotary frequencies.
    """
    if target.device.type != "cuda" or target.dtype not in (torch.bfloat16, torch.float16):
        return None
    if "fused" not in target.decode_paths:
        target.decode_paths["fused"] = None
        if has_known_layers(target):
            decoder = FusedDecoder(target)
            check_decode_path(target, decoder, "the fused decode path")
            target.decode_paths["fused"] = decoder
    return target.decode_paths["fused"]


def has_known_layers(target: Target) -> bool:
    """Return whether the layers are, module by module, those of a listed architecture."""
    kind = type(target.decoder).__name__.removesuffix("Model")
    if kind not in _LAYERS or target.parts.scale != 1 or target.parts.softcap is not None:
        return False
    if getattr(target.config, "hidden_act", None) != "silu":
        return False
    if getattr(target.decoder.rotary_emb, "rope_type", None) not in _ROPE_TYPES:
        return False
    module = f"transformers.models.{kind.lower()}.modeling_{kind.lower()}"
    classes = {"": "DecoderLayer", "self_attn": "Attention", "mlp": "MLP"}
    classes |= dict.fromkeys(("input_layernorm", "post_attention_layernorm"), "RMSNorm")
    if kind == "Qwen3":
        classes |= {"self_attn.q_norm": "RMSNorm", "self_attn.k_norm": "RMSNorm"}
    mlp_products = {f"mlp.{n}_proj" for n in ("gate", "up", "down")}
    products = mlp_products | {f"self_attn.{n}_proj" for n in "qkvo"}
    for layer in target.layers:
        modules = dict(layer.named_modules())
        modules.pop("mlp.act_fn", None)
        if modules.keys() != classes.keys() | products:
            return False
        for name, ending in classes.items():
            cls = type(modules[name])
            if (cls.__module__, cls.__name__) != (module, kind + ending):
                return False
        if not all(type(modules[name]) is nn.Linear for name in products):
            return False
        if any(modules[name].bias is not None for name in mlp_products):
            return False
        if len({modules[f"self_attn.{n}_proj"].bias is None for n in "qkv"}) > 1:
            return False
    modules = [target.decoder.rotary_emb, target.norm, *target.layers.modules()]
    return _are_unmodified(modules) and _is_uniform(target)


def _are_unmodified(modules: list[nn.Module]) -> bool:
    """Return whether no module has hooks or a replaced forward."""
    return not any(
        m._forward_hooks or m._forward_pre_hooks or "forward" in m.__dict__ for m in modules
    )


def _is_uniform(target: Target) -> bool:
    """Return whether weights are plain tensors (not quantised) of one device, dtype and eps."""
    parameters = [*target.layers.parameters(), target.norm.weight, target.parts.lm_head]
    norms = [m for m in target.layers.modules() if hasattr(m, "variance_epsilon")]
    return (
        len({(type(p.data), p.device, p.dtype) for p in parameters}) == 1
        and type(parameters[0].data) is Tensor
        and {m.variance_epsilon for m in norms} == {target.norm.variance_epsilon}
        and getattr(target.norm, "weight", None) is not None
    )


def _read_layer(layer: Any, config: Any) -> _Layer:
    """Read a layer's parameters; move its q, k and v weights into one tensor."""
    attention, mlp = layer.self_attn, layer.mlp
    projections = [attention.q_proj, attention.k_proj, attention.v_proj]
    qkv = _stack_in_place([p.weight for p in projections])
    bias = projections[0].bias is not None
    q_norm, k_norm = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    return _Layer(
        input_norm=layer.input_layernorm.weight,
        qkv=qkv,
        qkv_bias=_stack_in_place([p.bias for p in projections]) if bias else None,
        q_norm=None if q_norm is None else q_norm.weight,
        k_norm=None if k_norm is None else k_norm.weight,
        out=attention.o_proj.weight,
        out_bias=attention.o_proj.bias,
        mlp_norm=layer.post_attention_layernorm.weight,
        gate=mlp.gate_proj.weight,
        up=mlp.up_proj.weight,
        down=mlp.down_proj.weight,
        scale=float(attention.scaling),
        window=window_of(attention, config),
    )


def window_of(attention: Any, config: Any) -> int | None:
    """Return a layer's sliding window: Mistral sets it in the config, Qwen in the layer."""
    if type(attention).__name__ == "MistralAttention":
        return config.sliding_window
    return getattr(attention, "sliding_window", None)


def _stack_in_place(parameters: list[nn.Parameter]) -> Tensor:
    """Stack parameters into one tensor, of which each becomes a view; done once a model."""
    first = parameters[0].detach()
    size = [sum(len(p) for p in parameters), *first.shape[1:]]
    storage, end = first.untyped_storage().data_ptr(), first.data_ptr()
    for p in parameters:
        if p.untyped_storage().data_ptr() != storage or p.data_ptr() != end:
            break
        end += p.numel() * p.element_size()
    else:  # they are adjacent already
        return first.as_strided(size, first.stride())
    stacked = torch.cat([p.detach() for p in parameters])
    views = stacked.split([len(p) for p in parameters])
    for parameter, view in zip(parameters, views, strict=True):
        parameter.data = view
    return stacked
