"""Passes of a head over a whole sequence, with dense attention and no cache."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from draftlab.heads.head import DraftHead


def dense_pass(head: DraftHead, tokens: Tensor, hidden: Tensor) -> Tensor:
    """Return the outputs [T, H] of one causal pass at positions 0, 1, …, in chunks and windows.

    Args:
        hidden: [T, H], from `project_features` or earlier passes.
    """
    positions = torch.arange(len(tokens))

    def attend(number: int, *rows: Tensor) -> Tensor:
        query, key, value = (x.transpose(0, 1) for x in rows)
        chunk = getattr(head.layers[number], "chunk", None) or len(tokens)
        window = getattr(head.layers[number], "window", None) or len(tokens)
        column = positions[:, None]
        visible = (column // chunk * chunk <= positions) & (positions <= column)
        visible &= positions > column - window
        attended = F.scaled_dot_product_attention(
            query, key, value, attn_mask=visible, enable_gqa=True
        )
        return attended.transpose(0, 1)

    return head.run(tokens, hidden, positions, attend)


def dense_chain(
    head: DraftHead, tokens: Tensor, features: Tensor, start: int, num_steps: int = 4
) -> list[Tensor]:
    """Return the outputs [H] of a chain: verified pairs up to position `start`, then its own.

    Args:
        tokens: x_0, x_1, …, so the pair at position p has tokens[p + 1].
        features: [T, F].
    """
    hidden = head.project_features(features[: start + 1].to(head.fc.weight.dtype))
    outputs: list[Tensor] = []
    while len(outputs) < num_steps and len(hidden) < len(tokens):
        outputs.append(dense_pass(head, tokens[1 : len(hidden) + 1], hidden)[-1])
        hidden = torch.cat([hidden, outputs[-1][None]])
    return outputs
