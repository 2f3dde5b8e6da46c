"""How decoding plugs into any transformers model: cached keys, masked by true positions.

transformers builds its masks from a cache length, which is one number for a whole batch. In
speculative decoding every row has its own length, so a forward pass states the position of each of
its tokens here. With a `RowCache` the model's own mask functions (causal, sliding window, chunked)
are evaluated on those positions; with a `PagedCache` the mask is a rule (`Visible`) that the paged
attention kernel applies. Stale keys of rejected drafts sit at later positions and are never seen.
Where conversations lie side by side in a row (`Documents`), the same rule holds within each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from draftlab.kernels.paged_attention import attend_paged
from draftlab.kernels.paged_plan import attend_reads
from draftlab.target_model.packed_rows import Documents, attend_in_one_kernel, one_kernel_serves

if TYPE_CHECKING:
    from draftlab.target_model.paged_cache import PagedCache

ATTENTION = "draftlab"
_positions: ContextVar[Tensor | None] = ContextVar("positions", default=None)
_paged: ContextVar[PagedCache | None] = ContextVar("paged", default=None)
_documents: ContextVar[Documents | None] = ContextVar("documents", default=None)


@dataclass(frozen=True)
class Visible:
    """Which keys a query at position q sees: max(q − window + 1, q // chunk · chunk, 0) … q."""

    window: int | None = None
    chunk: int | None = None


@contextmanager
def _held(variable: ContextVar[Any], value: object) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def step_positions(positions: Tensor) -> AbstractContextManager[None]:
    """Makes `positions` [B, M] those of the next forward pass inside the block."""
    return _held(_positions, positions)


def paged_step(cache: PagedCache) -> AbstractContextManager[None]:
    """Makes attention read `cache` inside the block."""
    return _held(_paged, cache)


def side_by_side(documents: Documents) -> AbstractContextManager[None]:
    """Makes the row of the next forward pass one of `documents` inside the block."""
    return _held(_documents, documents)


def _visible(local_size: int | None, config: Any) -> Visible:
    """The rule of a mask: transformers names the size of a window or a chunk, not which it is."""
    if local_size is None:
        return Visible()
    if local_size == getattr(config, "sliding_window", None):
        return Visible(window=local_size)
    if local_size == getattr(config, "attention_chunk_size", None):
        return Visible(chunk=local_size)
    raise ValueError(
        f"expected a sliding window or a chunk of {local_size} in the target's config, found "
        "neither: this architecture's mask needs an entry in draftlab/target_model/attention.py"
    )


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Tensor],
    device: torch.device,
    local_size: int | None = None,
    **options: Any,
) -> Tensor | Visible | None:
    """Boolean mask [B, 1, M, S], True where a query sees a key; the rule where it does."""
    if _paged.get() is not None or _documents.get() is not None:
        return _visible(local_size, options.get("config"))
    positions = _positions.get()
    if positions is None:
        return sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            mask_function=mask_function,
            device=device,
            local_size=local_size,
            **options,
        )
    rows = torch.arange(batch_size, device=device)[:, None, None, None]
    heads = torch.zeros(1, dtype=torch.long, device=device)[:, None, None, None]
    keys = torch.arange(kv_length, device=device)[None, None, None, :]
    return mask_function(rows, heads, positions[:, None, :, None], keys)


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Visible | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of a layer, over pages, within each of several documents, or over whole rows.

    Returns:
        [B, M, heads, head_dim], and None for the weights.
    """
    scores = {"scaling": scaling, "softcap": softcap, "s_aux": s_aux}
    if (cache := _paged.get()) is not None:
        return _attend_pages(cache, query, key, value, _rule(attention_mask), **scores), None
    if (documents := _documents.get()) is not None:
        rule, rows = _rule(attention_mask), (query, key, value)
        return _attend_documents(documents, module, *rows, rule, **scores, **options), None
    return _attend_rows(module, query, key, value, attention_mask, **scores, **options), None


def _rule(attention_mask: Any) -> Visible:
    """What `_mask` gave the model for a layer, unless the model made something else of it."""
    if not isinstance(attention_mask, Visible):
        raise TypeError(f"expected a mask rule, found {type(attention_mask)}")
    return attention_mask


def _attend_pages(
    cache: PagedCache,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rule: Visible,
    *,
    scaling: float | None,
    softcap: float | None,
    s_aux: Tensor | None,
) -> Tensor:
    """Of pools of keys and values, the cache's for this layer; [B, M, heads, head_dim]."""
    options = {
        "scale": query.shape[-1] ** -0.5 if scaling is None else scaling,
        "softcap": softcap,
        "sinks": s_aux,
    }
    query = query.transpose(1, 2)
    if query.device.type == "cpu":  # planned once for all layers; a GPU needs no plan
        reads = cache.reads(query.shape[2] // key.shape[2], query.dtype, rule.window, rule.chunk)
        return attend_reads(query, key, value, reads, **options)
    where = (table.to(query.device) for table in (cache.block_table, cache.positions))
    return attend_paged(query, key, value, *where, window=rule.window, chunk=rule.chunk, **options)


def _attend_documents(
    documents: Documents,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rule: Visible,
    **options: Any,
) -> Tensor:
    """Within each of the row's documents, in one kernel where there is one; [1, T, heads, …]."""
    if options.get("position_bias") is not None:
        raise TypeError("expected no biases of positions between documents, found some")
    if rule.chunk is not None:
        documents = documents.cut(rule.chunk)
    plain = options["softcap"] is None and options["s_aux"] is None
    if plain and one_kernel_serves(query, key, value):
        scale = options["scaling"]
        return attend_in_one_kernel(query, key, value, documents, rule.window, scale)
    if documents.at_once:
        which = f"{query.dtype} heads of {query.shape[-1]}"
        raise NotImplementedError(
            f"no kernel for {which}{'' if plain else ' with sinks or capped scores'}"
        )
    parts = []
    for part, length in zip(documents.slices, documents.lengths, strict=True):
        mine = (x[:, :, part] for x in (query, key, value))
        seen = documents.window_mask(length, rule.window, query.device)
        parts.append(_attend_rows(module, *mine, seen, **options))
    return torch.cat(parts, 1)


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
    """SDPA; written out where a model caps its scores (Gemma 2) or has sinks (gpt-oss).

    transformers' SDPA refuses the former and silently leaves out the latter.

    Returns:
        [B, M, heads, head_dim].
    """
    if softcap is None and s_aux is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )[0]
    if attention_mask is None:  # transformers leaves out a plain causal mask
        q_length, kv_length = query.shape[2], key.shape[2]
        attention_mask = torch.ones(
            q_length, kv_length, dtype=torch.bool, device=query.device
        ).tril(kv_length - q_length)
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.float().masked_fill(~attention_mask, float("-inf"))
    if s_aux is not None:  # a sink takes part in the softmax and gives nothing
        sinks = s_aux.float().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights.to(value.dtype) @ value).transpose(1, 2).contiguous()


AttentionInterface.register(ATTENTION, _attend)
AttentionMaskInterface.register(ATTENTION, _mask)
