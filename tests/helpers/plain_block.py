"""A block head, one slot at a time, from methods §7 alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.helpers.plain_chain import PlainChain


class PlainBlock(PlainChain):
    """Reads a block head's tensors by name, and its config; nothing of its code."""

    def __init__(self, w: dict[str, Tensor], config: Any) -> None:
        super().__init__(w, config)
        self.options = self.options | {"qk_norm": True}

    def block(self, features: Tensor, newest: int, num_slots: int) -> list[Tensor]:
        """Return the normed outputs [H] of the block behind positions 0 … t.

        Args:
            features: [t + 1, F]. newest: x_{t+1}.
        """
        context = [self.norm(self.w["fc.weight"] @ g, "hidden_norm") for g in features]
        ids = [newest, *[self.c.mask_token_id] * (num_slots - 1)]
        slots = [self.w["embed_tokens.weight"][i] for i in ids]
        for number in range(self.c.num_layers):
            layer = f"layers.{number}"
            inputs = [*context, *(self.norm(u, f"{layer}.input_layernorm") for u in slots)]
            prefix = f"{layer}.self_attn."
            cache = tuple(
                (self.heads(x, prefix + "k", p), self.heads(x, prefix + "v", None))
                for p, x in enumerate(inputs)
            )
            slots = [
                self.feed_forward(
                    u
                    + self.attend_all(
                        x, layer, len(context) + i, self.seen(cache, len(context), i, number)
                    ),
                    layer,
                )
                for i, (u, x) in enumerate(zip(slots, inputs[len(context) :], strict=True))
            ]
        return [self.norm(u, "norm") for u in slots]

    def seen(self, cache: tuple, context: int, slot: int, layer: int) -> tuple:
        """Return the keys that a slot sees: a sliding layer's window ends with the slot's own."""
        last = context + slot + 1 if self.c.is_causal else len(cache)
        slides = self.c.layer_types is None or self.c.layer_types[layer] == "sliding_attention"
        window = self.c.sliding_window if slides else None
        first = 0 if window is None else max(0, context + slot + 1 - window)
        return cache[first:last]

    def attend_all(self, x: Tensor, layer: str, position: int, cache: tuple) -> Tensor:
        """Return what o_proj gives for the query at `position` over all keys of the cache."""
        prefix, c = f"{layer}.self_attn.", self.c
        group, mixed = c.num_attention_heads // c.num_key_value_heads, []
        for n, query in enumerate(self.heads(x, prefix + "q", position)):
            keys = torch.stack([k[n // group] for k, _ in cache])
            values = torch.stack([v[n // group] for _, v in cache])
            mixed.append((keys @ query / c.head_dim**0.5).softmax(0) @ values)
        return self.w[prefix + "o_proj.weight"] @ torch.cat(mixed)

    def feed_forward(self, out: Tensor, layer: str) -> Tensor:
        y = self.norm(out, f"{layer}.post_attention_layernorm")
        gate, up = (self.w[f"{layer}.mlp.{name}_proj.weight"] @ y for name in ("gate", "up"))
        return out + self.w[f"{layer}.mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up)

    def logits(self, hidden: Tensor, previous: int) -> Tensor:
        """Return the logits [D] of a slot from its normed output and the token before its draft."""
        logits = self.w["lm_head.weight"] @ hidden
        if self.c.markov_rank:
            factor = self.w["markov_head.markov_w1.weight"][previous]
            logits = logits + self.w["markov_head.markov_w2.weight"] @ factor
        return logits

    def confidence(self, hidden: Tensor, previous: int) -> Tensor:
        """Return the logit of a draft's acceptance."""
        factor = self.w["markov_head.markov_w1.weight"][previous]
        proj = self.w["confidence_head.proj.weight"][0]
        return proj @ torch.cat([hidden, factor]) + self.w["confidence_head.proj.bias"][0]
