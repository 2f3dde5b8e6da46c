"""Attention of any transformers model over draftlab's KV caches and packed rows.

transformers builds its masks from a cache length, which is one number for a whole batch. In
speculative decoding every row has its own length, so each forward pass sets the position of each of
its tokens here. Where a cache gathers, the model's own mask functions (causal, sliding window,
chunked) are evaluated on those positions; with pages or a `PackedRow` the mask is a `MaskRule`,
which the kernels apply. Stale keys of rejected drafts have later positions and are never visible.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from draftlab.kernels.paged_attention import attend_paged
from draftlab.kernels.paged_attention.plan import attend_reads
from draftlab.target_model.packed_rows import PackedRow, supports_varlen, varlen_attention

if TYPE_CHECKING:
    from draftlab.target_model.paged_cache import PagedCache

ATTENTION = "draftlab"
MOST_SCORES = 2**28
"""Scores that are in memory at once where capped scores or sinks are computed without a kernel."""


def text_attention(config: Any) -> dict[str, str]:
    """Return transformers' option that gives this attention to a config's text model alone.

    Vision towers may look their attention up in tables of their own.
    """
    text = config.get_text_config()
    parts = {name: getattr(config, name, None) for name in config.sub_configs}
    return {"": ATTENTION} | {
        name: ATTENTION
        for name, part in parts.items()
        if part is not None and part.get_text_config() is text
    }


@dataclass(frozen=True)
class MaskRule:
    """The keys that a query at position q sees: max(q − window + 1, q // chunk · chunk, 0) … q."""

    window: int | None = None
    chunk: int | None = None


@dataclass(frozen=True)
class AttentionInputs:
    """What a forward pass sets for its attention layers, beside their own arguments.

    Attributes:
        positions: [B, M] of the tokens, which mask the keys of a cache that gathers.
        paged_cache: cache that keys and values are read from.
        packed_row: conversations that do not see each other.
    """

    positions: Tensor | None = None
    paged_cache: PagedCache | None = None
    packed_row: PackedRow | None = None

    @property
    def has_rule(self) -> bool:
        """Whether masks are rules, not tensors."""
        cache = self.paged_cache
        return self.packed_row is not None or (cache is not None and not cache.gathers)


_NO_INPUTS = AttentionInputs()
_inputs: ContextVar[AttentionInputs] = ContextVar("inputs", default=_NO_INPUTS)


@contextmanager
def attention_inputs(**inputs: Any) -> Iterator[None]:
    """Set `AttentionInputs` inside the block."""
    token = _inputs.set(AttentionInputs(**inputs))
    try:
        yield
    finally:
        _inputs.reset(token)


def current_inputs() -> AttentionInputs:
    """Return the inputs of the forward pass that runs now."""
    return _inputs.get()


def _mask_rule(local_size: int | None, config: Any) -> MaskRule:
    """Return a mask's rule: transformers passes a size, and the config says of what."""
    if local_size is None:
        return MaskRule()
    if local_size == getattr(config, "sliding_window", None):
        return MaskRule(window=local_size)
    if local_size == getattr(config, "attention_chunk_size", None):
        return MaskRule(chunk=local_size)
    raise ValueError(
        f"expected a sliding window or a chunk of {local_size} in the target's config, found "
        "neither: this architecture's mask needs an entry in draftlab/target_model/attention.py"
    )


def _build_mask(local_size: int | None = None, **options: Any) -> Tensor | MaskRule | None:
    """Return a boolean mask [B, 1, M, S], True where a query sees a key, or its rule.

    Args:
        local_size: size of a sliding window or a chunk.
        options: transformers' other arguments of a mask function.
    """
    inputs = _inputs.get()
    if inputs.has_rule:
        return _mask_rule(local_size, options.get("config"))
    if (positions := inputs.positions) is None:
        return sdpa_mask(local_size=local_size, **options)
    device = options["device"]
    rows = torch.arange(options["batch_size"], device=device)[:, None, None, None]
    heads = torch.zeros(1, dtype=torch.long, device=device)[:, None, None, None]
    keys = torch.arange(options["kv_length"], device=device)[None, None, None, :]
    return options["mask_function"](rows, heads, positions[:, None, :, None], keys)


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | MaskRule | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return a layer's attention over a paged cache, a packed row or plain rows, [B, M, heads,
    head_dim], and None for the weights.
    """
    tensors, inputs = (query, key, value), _inputs.get()
    scores = {"scaling": scaling, "softcap": softcap, "s_aux": s_aux}
    if not inputs.has_rule:
        return _attend_rows(module, *tensors, attention_mask, **scores, **options), None
    if not isinstance(attention_mask, MaskRule):  # the model changed what `_build_mask` returned
        raise TypeError(f"expected a mask rule, found {type(attention_mask)}")
    if (cache := inputs.paged_cache) is None:
        options |= scores
        return _attend_packed_row(
            inputs.packed_row, module, *tensors, attention_mask, **options
        ), None
    rule, query = attention_mask, query.transpose(1, 2)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    options = {"scale": scale, "softcap": softcap, "sinks": s_aux}
    # `key` and `value` are the cache's pools of this layer.
    if query.device.type == "cpu":  # planned once for all layers; a GPU needs no plan
        reads = cache.reads(query.shape[2] // key.shape[2], query.dtype, rule.window, rule.chunk)
        return attend_reads(query, key, value, reads, **options), None
    tables = (table.to(query.device) for table in (cache.block_table, cache.positions))
    options |= {"window": rule.window, "chunk": rule.chunk}
    return attend_paged(query, key, value, *tables, **options), None


def _attend_packed_row(
    packed_row: PackedRow,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rule: MaskRule,
    **options: Any,
) -> Tensor:
    """Attend within each conversation, in one kernel if possible; returns [1, T, heads, …]."""
    if options.get("position_bias") is not None:
        raise TypeError("expected attention without a position bias in a packed row, found one")
    if rule.chunk is not None:
        packed_row = packed_row.split_chunks(rule.chunk)
    plain_scores = options["softcap"] is None and options["s_aux"] is None
    if plain_scores and supports_varlen(query, key, value):
        return varlen_attention(query, key, value, packed_row, rule.window, options["scaling"])
    if packed_row.require_varlen:
        raise NotImplementedError(
            f"no kernel for {query.dtype} heads of {query.shape[-1]}"
            + ("" if plain_scores else " with sinks or capped scores")
        )
    outputs = []
    for columns, length in zip(packed_row.slices, packed_row.lengths, strict=True):
        tensors = (x[:, :, columns] for x in (query, key, value))
        mask = packed_row.window_mask(length, rule.window, query.device)
        outputs.append(_attend_rows(module, *tensors, mask, **options))
    return torch.cat(outputs, 1)


def _attend_rows(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None,
    softcap: float | None,
    s_aux: Tensor | None,
    **options: Any,
) -> Tensor:
    """Return SDPA [B, M, heads, head_dim], computed eagerly if a model caps its scores (Gemma 2) or
    has sinks (gpt-oss): transformers' refuses capped scores and silently ignores sinks.
    """
    if softcap is None and s_aux is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )[0]
    if attention_mask is None:  # transformers passes None for a plain causal mask
        q_length, kv_length = query.shape[2], key.shape[2]
        attention_mask = torch.ones(
            q_length, kv_length, dtype=torch.bool, device=query.device
        ).tril(kv_length - q_length)
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    at_once = max(1, MOST_SCORES // (query.shape[0] * query.shape[1] * key.shape[2]))
    attended = []
    for part, mask in zip(query.split(at_once, -2), attention_mask.split(at_once, -2), strict=True):
        scores = part @ key.mT * scaling
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.float().masked_fill(~mask, float("-inf"))
        if s_aux is not None:  # a sink enters the softmax and adds no value
            sinks = s_aux.float().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
            weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        attended.append(weights.to(value.dtype) @ value)
    return torch.cat(attended, 2).transpose(1, 2).contiguous()


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, _build_mask)
