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
    angles, column = head.rope.angles(positions), positions[:, None]
    for layer in head.layers:
        if layer is head.layer:
            x, residual = head.layer_inputs(head.embed(tokens), hidden)
        else:
            x, residual = layer.input_layernorm(hidden), hidden
        rows = layer.self_attn.query(x, angles), *layer.self_attn.key_value(x, angles)
        chunk, window = layer.chunk or len(tokens), layer.window or len(tokens)
        visible = (column // chunk * chunk <= positions) & (positions <= column)
        visible &= positions > column - window
        query_key_value = (x.transpose(0, 1) for x in rows)
        attended = F.scaled_dot_product_attention(
            *query_key_value, attn_mask=visible, enable_gqa=True
        )
        hidden = layer.output(attended.transpose(0, 1), residual)
    return head.output_norm(hidden)


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
