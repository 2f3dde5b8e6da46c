"""The architectures whose layers draftlab's decode paths compute, and their parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from draftlab.errors import UserError
from draftlab.kernels.compile_ahead import CompileAhead
from draftlab.kernels.paged_attention import slot_mapping
from draftlab.target_model.model import DecodePath, Target
from draftlab.target_model.paged_cache import PagedCache

_LAYERS = {"Llama", "Mistral", "Qwen2", "Qwen3"}
_ROPE_TYPES = {"default", "linear", "llama3", "yarn"}  # frequencies do not depend on the input


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
    if any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in modules):
        return False
    return _is_uniform(target)


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


def window_of(attention: Any, config: Any) -> int | None:
    """Return a layer's sliding window: Mistral sets it in the config, Qwen in the layer."""
    if type(attention).__name__ == "MistralAttention":
        return config.sliding_window
    return getattr(attention, "sliding_window", None)


class LayerWeights:
    """The parameters of a Llama-style layer of transformers or of a head, whose norms have one eps;
    `stack` joins those of queries, keys and values. None: it has none.
    """

    def __init__(self, layer: Any, stack: Callable[[list[Tensor]], Tensor] = torch.cat) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        biases = [p.bias for p in projections if p.bias is not None]
        norms = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
        self.q_norm, self.k_norm = (getattr(norm, "weight", None) for norm in norms)
        self.input_norm: Tensor | None = getattr(layer.input_layernorm, "weight", None)
        self.qkv = stack([p.weight for p in projections])
        self.qkv_bias = stack(biases) if biases else None
        self.out, self.out_bias = attention.o_proj.weight, attention.o_proj.bias
        self.mlp_norm = layer.post_attention_layernorm.weight
        self.gate, self.up = mlp.gate_proj.weight, mlp.up_proj.weight
        self.down = mlp.down_proj.weight


_PROMPTS, _BLOCK = (40, 13), 16
"""Tokens of two prompts (two rows of the longer exceed `kernels.linear.MAX_ROWS`, so other kernels
run; the shorter fills its first block in a later step); positions in a block, those of
`check_capabilities`, whose kernels are compiled."""


@torch.inference_mode()
def check_decode_path(target: Target, path: DecodePath, name: str) -> None:
    """Compare a path with transformers on random tokens: two prompts, then steps of ragged rows;
    raise a `UserError` if states or logits differ by more than rounding, as after a change in a
    release of transformers.
    """
    steps = ((7, 5), (3, 0), (1, 2))
    decoded = sum(max(counts) for counts in steps)
    prompt, shorter = (min(length, target.max_length - decoded) for length in _PROMPTS)
    least = decoded + max(steps[0])
    if target.max_length < least:
        raise UserError(
            f"expected a target of at least {least} positions, with which {name} is compared "
            f"with transformers, found {target.max_length}",
            where=target.folder / "config.json",
            do="check max_position_embeddings, or fetch the file again",
        )
    blocks = -(-(prompt + decoded) // _BLOCK)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, target.vocab_size, (2, prompt), generator=generator).to(target.device)
    table = torch.arange(2 * blocks, 0, -1, dtype=torch.int32, device=target.device)
    table = table.view(2, blocks)
    boundaries = tuple(range(target.num_layers + 1))
    caches = [target.new_paged_cache(2 * blocks + 1, _BLOCK) for _ in range(2)]
    # Rounding differs from layer to layer at random; 32 random layers gave 0.064 in bfloat16.
    exact = target.dtype == torch.float32
    tolerance = (1e-5 if exact else 2e-2) * max(target.num_layers, 12) ** 0.5
    lengths = torch.zeros(2, 1, dtype=torch.int64, device=target.device)
    passes = []
    for counts in ((prompt, shorter), *steps):
        count = torch.tensor(counts, device=target.device)[:, None]
        column = torch.arange(max(counts), device=target.device)
        positions = (lengths + column).where(column < count, -1)
        passes.append((ids[:, : len(column)], positions, slot_mapping(table, positions, _BLOCK)))
        lengths += count

    def run(
        one: DecodePath | Target, cache: PagedCache, ids: Tensor, positions: Tensor, slots: Tensor
    ) -> tuple[Tensor, Tensor]:
        cache.at(table, positions, slots)
        states = one.states(ids, boundaries, positions=positions, cache=cache)
        return states.features, one.logits(states.last)

    CompileAhead(target.device)(lambda: [run(path, caches[0], *each) for each in passes])
    for each in passes:
        results = (run(*one, *each) for one in zip((path, target), caches, strict=True))
        real = each[1] >= 0
        for kind, one, other in zip(("states", "logits"), *results, strict=True):
            one, other = one[real].float(), other[real].float()
            error = float((one - other).norm() / other.norm().clamp(min=1e-6))
            if not error <= tolerance:  # NaN is refused too
                raise UserError(
                    f"{name} and transformers differ in their {kind} by {error:.3g} (relative; "
                    f"expected at most {tolerance:.3g}): {type(target.layers[0]).__name__} "
                    "computes something that draftlab does not know",
                    where=target.folder,
                    do="remove its architecture from the list in known_layers.py, or fix the path",
                )
