"""One pass of a head with dense attention over its own positions."""

from __future__ import annotations

import torch
from torch import Tensor

from draftlab.heads.head import DraftHead
from draftlab.heads.llama4 import EagleLlama4Head


def causal_attention(_: int, *inputs: Tensor) -> Tensor:
    """Return causal attention of query, key and value [T, heads, head_dim]."""
    query, key, value = (t.transpose(0, 1)[None] for t in inputs)
    attended = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=True
    )
    return attended[0].transpose(0, 1)


def dense_logits(head: DraftHead, tokens: Tensor, hidden: Tensor) -> Tensor:
    """Return the logits [T, D] of one pass at positions 0, 1, …."""
    return head.logits(head.run(tokens, hidden, torch.arange(len(tokens)), causal_attention))


def visible_positions(head: EagleLlama4Head, number: int, positions: Tensor) -> Tensor:
    """Return which positions the queries of a layer see, bool [T, T]."""
    query, key = positions[:, None], positions[None]
    chunk = head.layers[number].chunk or len(positions)
    return (query // chunk * chunk <= key) & (key <= query)


def run_llama4_head(head: EagleLlama4Head, tokens: Tensor, states: Tensor) -> Tensor:
    """Return the outputs [T, H] of one pass with dense attention in chunks."""
    positions = torch.arange(len(tokens))

    def attend(number: int, *rows: Tensor) -> Tensor:
        query, key, value = (x.transpose(0, 1) for x in rows)
        mask = visible_positions(head, number, positions)
        attended = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, enable_gqa=True
        )
        return attended.transpose(0, 1)

    return head.run(tokens, head.project_features(states), positions, attend)
