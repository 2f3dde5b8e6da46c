"""A target's decode pass on six kernels a layer, for architectures whose layers we know.

transformers runs a decoder layer as some twenty kernels; at one token a row, launching and draining
them costs as much as reading the weights. For the layers of `_LAYERS` the same computation is
written here with the kernels of `kernels/`: qkv, rotation and cache write, attention, output
product plus residual, gated product, down product plus residual, the last two of which begin the
norm of what follows. Prompts take the same way: their products are cuBLAS's, and few calls from
the host a layer keep a GPU busy that transformers' modules let wait. Other targets keep going
through transformers (`fused_decoder` gives None).

`check_agreement` compares both on random tokens, so a release of transformers that changes one
of these layers is found out when a target is loaded and not in its acceptance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftlab.kernels.linear import gated_linear, linear, linear_then_norm
from draftlab.kernels.paged_attention import attend_paged
from draftlab.kernels.rope_write import rope_angles, rope_write
from draftlab.target_model.model import States, Target
from draftlab.target_model.paged_cache import PagedCache
from draftlab.target_model.path_check import check_agreement

_LAYERS = {"Llama", "Mistral", "Qwen2", "Qwen3"}
_fused: WeakKeyDictionary[Target, FusedDecoder | None] = WeakKeyDictionary()  # checked once
_ROPE_TYPES = {"default", "linear", "llama3", "yarn"}  # frequencies do not depend on the input


@dataclass(frozen=True)
class _Layer:
    """A decoder layer's parameters, all of them the loaded modules' own storage."""

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
    """The decoder of a listed target; `fused_decoder` says whether there is one.

    Queries, keys and values become one product: their weights move into one tensor, of which the
    modules keep views, so memory does not grow and the state dict stays what it was.

    Args:
        target: a loaded target that `knows` knows; on a CPU the kernels' references run.
    """

    @torch.no_grad()
    def __init__(self, target: Target) -> None:
        self.target = target
        self.config, self.parts = target.config, target.parts
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
    ) -> States:
        """`Target.states` with a `PagedCache` aimed at these tokens, without the host waiting.

        Args:
            token_ids: int64 [B, M].
            boundaries: whose states become the features, ascending.
            positions: int64 [B, M], −1 for padding (its states mean nothing).
            cache: where earlier keys are and new ones go.
        """
        shape = token_ids.shape
        x = F.embedding(token_ids.flatten(), self.parts.embeddings)
        angles = rope_angles(positions.flatten(), self.inv_freq, self.scaling, x.dtype)
        slots = cache.slots.flatten()
        taken, normed = [], None
        for number, (layer, pool) in enumerate(zip(self.layers, cache.layers, strict=True)):
            if number in boundaries:
                taken.append(x)
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
                query.view(*shape, *query.shape[1:]),
                pool.keys,
                pool.values,
                cache.block_table,
                cache.positions,
                scale=layer.scale,
                window=layer.window,
                ahead=layer.out,
            ).view(len(x), -1)
            x, normed = linear_then_norm(
                attended, layer.out, layer.mlp_norm, self.eps, residual=x, bias=layer.out_bias
            )
            inner = gated_linear(normed, layer.gate, layer.up)
            x, normed = linear_then_norm(
                inner, layer.down, self.norms[number + 1], self.eps, residual=x
            )
        if self.target.num_layers in boundaries:
            taken.append(x)
        last = x.view(*shape, -1)
        features = torch.cat(taken, -1).view(*shape, -1) if taken else last[..., :0]
        return States(features, last)

    @torch.inference_mode()
    def logits(self, last: Tensor) -> Tensor:
        """Logits [..., V] of last states [..., Ht], in their dtype: `Target.logits` widens them."""
        norm = self.target.norm.weight
        flat = last.flatten(0, -2)
        found = linear(flat, self.parts.lm_head, norm_weight=norm, eps=self.eps)
        return found.view(*last.shape[:-1], -1)


def fused_decoder(target: Target) -> FusedDecoder | None:
    """The fused path of a target, checked; None where the target keeps to transformers.

    None: not on CUDA, not 16-bit, an architecture not listed, a layer with parameters or hooks that
    the listed ones do not have, or rotary frequencies that change with the input.
    """
    if target.device.type != "cuda" or target.dtype not in (torch.bfloat16, torch.float16):
        return None
    if target not in _fused:
        _fused[target] = None
        if knows(target):
            decoder = FusedDecoder(target)
            check_agreement(target, decoder, "the fused decode path")
            _fused[target] = decoder
    return _fused[target]


def knows(target: Target) -> bool:
    """Whether the target's layers are, module by module, those of a listed architecture."""
    kind = type(target.decoder).__name__.removesuffix("Model")
    home = f"transformers.models.{kind.lower()}.modeling_{kind.lower()}"
    if kind not in _LAYERS or target.parts.scale != 1 or target.parts.softcap is not None:
        return False
    if getattr(target.config, "hidden_act", None) != "silu":
        return False
    if getattr(target.decoder.rotary_emb, "rope_type", None) not in _ROPE_TYPES:
        return False
    expected = {
        "": "DecoderLayer",
        "self_attn": "Attention",
        "mlp": "MLP",
        "input_layernorm": "RMSNorm",
        "post_attention_layernorm": "RMSNorm",
    }
    if kind == "Qwen3":
        expected |= {"self_attn.q_norm": "RMSNorm", "self_attn.k_norm": "RMSNorm"}
    products = {f"self_attn.{n}_proj" for n in "qkvo"}
    products |= {f"mlp.{n}_proj" for n in ("gate", "up", "down")}
    for layer in target.layers:
        modules = dict(layer.named_modules())
        modules.pop("mlp.act_fn", None)
        if modules.keys() != expected.keys() | products:
            return False
        for name, ending in expected.items():
            cls = type(modules[name])
            if (cls.__module__, cls.__name__) != (home, kind + ending):
                return False
        if not all(type(modules[name]) is nn.Linear for name in products):
            return False
        if any(modules[f"mlp.{n}_proj"].bias is not None for n in ("gate", "up", "down")):
            return False
        if len({modules[f"self_attn.{n}_proj"].bias is None for n in "qkv"}) > 1:
            return False
    every = [target.decoder.rotary_emb, target.norm, *target.layers.modules()]
    return _plain(every) and _uniform(target)


def _plain(modules: list[nn.Module]) -> bool:
    """No hooks, and nobody has replaced a forward."""
    return not any(
        m._forward_hooks or m._forward_pre_hooks or "forward" in m.__dict__ for m in modules
    )


def _uniform(target: Target) -> bool:
    """One device, one dtype and one eps throughout, and plain tensors: quantised ones are not."""
    parameters = [*target.layers.parameters(), target.norm.weight, target.parts.lm_head]
    norms = [m for m in target.layers.modules() if hasattr(m, "variance_epsilon")]
    return (
        len({(type(p.data), p.device, p.dtype) for p in parameters}) == 1
        and type(parameters[0].data) is Tensor
        and {m.variance_epsilon for m in norms} == {target.norm.variance_epsilon}
        and getattr(target.norm, "weight", None) is not None
    )


def _read_layer(layer: Any, config: Any) -> _Layer:
    """Reads a layer's parameters; moves its q, k and v weights into one tensor."""
    attention, mlp = layer.self_attn, layer.mlp
    projections = [attention.q_proj, attention.k_proj, attention.v_proj]
    qkv = _share([p.weight for p in projections])
    bias = projections[0].bias is not None
    q_norm, k_norm = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    return _Layer(
        input_norm=layer.input_layernorm.weight,
        qkv=qkv,
        qkv_bias=_share([p.bias for p in projections]) if bias else None,
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
    """A layer's sliding window: Mistral's holds for every layer, Qwen's for those that say so."""
    if type(attention).__name__ == "MistralAttention":
        return config.sliding_window
    return getattr(attention, "sliding_window", None)


def _share(parameters: list[nn.Parameter]) -> Tensor:
    """One tensor of these, stacked; each becomes a view of its part. Done once a model."""
    first = parameters[0].detach()
    size = [sum(len(p) for p in parameters), *first.shape[1:]]
    storage, end = first.untyped_storage().data_ptr(), first.data_ptr()
    for p in parameters:
        if p.untyped_storage().data_ptr() != storage or p.data_ptr() != end:
            break
        end += p.numel() * p.element_size()
    else:
        return first.as_strided(size, first.stride())
    stacked = torch.cat([p.detach() for p in parameters])
    parts = stacked.split([len(p) for p in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.data = part
    return stacked
