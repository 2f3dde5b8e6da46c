"""Teacher-forced drafts of a head, without the engine's drafter and without its KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class _Drafts:
    """Teacher-forced drafts of a head along rows of tokens int64 [B, S].

    Args:
        features: features of the target [B, S, F].
        k: drafts a step.
    """

    def __init__(self, head: Any, rows: Tensor, features: Tensor, k: int) -> None:
        self.head, self.rows, self.k = head, rows, k
        self.hidden = head.project_features(features[:, :-1].to(head.fc.weight.dtype))

    def draft(self, start: int, depth: int) -> Tensor:
        """Return the logits [B, W] of draft `depth` of a step.

        Args:
            start: position of the last pair before the drafts.
        """
        raise NotImplementedError


class ParallelDrafts(_Drafts):
    """Drafts of a parallel head: masked positions that do not depend on earlier drafts."""

    def draft(self, start: int, depth: int) -> Tensor:
        pairs, hidden = self.rows[:, 1 : start + 2], self.hidden[:, : start + 1]
        masks = pairs.new_full((len(pairs), depth), self.head.mask_token_id)
        tokens = torch.cat([pairs, masks], 1)
        hidden = torch.cat([hidden, self.head.mask_state().expand(*masks.shape, -1)], 1)
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head.logits(self.head.run(tokens, hidden, positions, _causal)[:, -1])


def _causal(_: int, *inputs: Tensor) -> Tensor:
    query, key, value = (t.transpose(1, 2) for t in inputs)
    output = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return output.transpose(1, 2)


class BlockDrafts(_Drafts):
    """Drafts of a block head, from a block of K drafts after the context."""

    def draft(self, start: int, depth: int) -> Tensor:
        head, config = self.head, self.head.config
        context, newest = self.hidden[:, : start + 1], self.rows[:, start + 1]
        slots = torch.arange(self.k + config.first_slot, device=newest.device)
        keys = torch.arange(start + 1 + len(slots), device=newest.device)
        last = start + 1 + (slots[:, None] if config.is_causal else slots[-1])
        context_angles = head.rope.angles(torch.arange(start + 1, device=newest.device))
        angles = head.rope.angles(start + 1 + slots)
        hidden = head.embed(head.block_tokens(newest, len(slots)))
        for layer, window in zip(head.layers, config.windows, strict=True):
            visible = (keys <= last).expand(len(slots), -1)
            if window is not None:
                visible = visible & (keys > start + 1 + slots[:, None] - window)
            attention, x = layer.self_attn, layer.input_layernorm(hidden)
            pairs = (attention.key_value(context, context_angles), attention.key_value(x, angles))
            key, value = (torch.cat(pair, 1).transpose(1, 2) for pair in zip(*pairs, strict=True))
            query = attention.query(x, angles).transpose(1, 2)
            attended = F.scaled_dot_product_attention(
                query, key, value, attn_mask=visible, enable_gqa=True
            )
            hidden = layer.output(attended.transpose(1, 2), hidden)
        previous = self.rows[:, start + 1 + depth]
        return head.logits(hidden[:, config.first_slot + depth], previous)


LayerCache = tuple[Tensor, ...]
"""Keys and values of one layer, each [B, kv heads, M, head_dim]."""


class ChainDrafts(_Drafts):
    """Drafts of a chain head, each from the output of the one before."""

    def __init__(self, head: Any, rows: Tensor, features: Tensor, k: int) -> None:
        super().__init__(head, rows, features, k)
        self.outputs, self.keys = self._run(rows[:, 1:], self.hidden, 0, None)

    def draft(self, start: int, depth: int) -> Tensor:
        output = self.outputs[:, start, None]
        keys: list[LayerCache] = [tuple(t[:, :, : start + 1] for t in layer) for layer in self.keys]
        for position in range(start + 1, start + depth + 1):
            token = self.rows[:, position + 1, None]
            output, keys = self._run(token, output, position, keys)
        return self.head.logits(output[:, 0])

    def _run(
        self, tokens: Tensor, hidden: Tensor, start: int, past: Sequence[LayerCache] | None
    ) -> tuple[Tensor, list[LayerCache]]:
        """Return outputs [B, M, H] of pairs at positions from `start`, and the KV cache."""
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        key_positions = torch.arange(start + tokens.shape[1], device=tokens.device)
        caches: list[LayerCache] = []

        def attend(number: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys = key.transpose(1, 2), value.transpose(1, 2)
            if past is not None:
                keys = tuple(torch.cat(pair, 2) for pair in zip(past[number], keys, strict=True))
            caches.append(keys)
            chunk = self.head.layers[number].chunk or len(key_positions)
            at = positions[:, None]
            visible = (at // chunk * chunk <= key_positions) & (key_positions <= at)
            output = F.scaled_dot_product_attention(
                query.transpose(1, 2), *keys, attn_mask=visible, enable_gqa=True
            )
            return output.transpose(1, 2)

        return self.head.run(tokens, hidden, positions, attend), caches
