"""Chain and block heads, one position or slot at a time, from methods §2, §3 and §7 alone."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

Cache = tuple[tuple[Tensor, Tensor], ...]
"""Key and value of each position so far, [kv heads, head_dim]."""


class PlainChain:
    """Reads a head's tensors by name, and its config; nothing of its code.

    Args:
        w: tensors by the name they have in `state_dict`.
        config: anything with the fields of draftlab.json.
    """

    def __init__(self, w: dict[str, Tensor], config: Any) -> None:
        self.w, self.c = w, config
        self.options = vars(config)  # what a family lacks is off
        self.eagle = config.family == "eagle"
        self.empty: tuple[Cache, ...] = ((),) * config.num_layers

    def norm(self, x: Tensor, name: str) -> Tensor:
        return self.w[f"{name}.weight"] * x / torch.sqrt((x * x).mean() + self.c.rms_norm_eps)

    def project_features(self, features: Tensor) -> Tensor:
        """Hidden state [H] of one position's features [F]."""
        if self.eagle:
            return self.norm(features, "target_norm")
        if self.options.get("norm_before_fc"):
            features = self.norm(features, "input_norm")
        if self.options.get("fc_norm"):
            parts = features.chunk(len(self.c.boundaries))
            features = torch.cat([self.norm(p, f"fc_norm.{i}") for i, p in enumerate(parts)])
        return self.w["fc.weight"] @ features

    def heads(self, x: Tensor, name: str, position: int | None) -> Tensor:
        d = self.c.head_dim
        y = (self.w[f"{name}_proj.weight"] @ x).view(-1, d)
        if self.options.get("qk_norm") and position is not None:
            y = torch.stack([self.norm(row, f"{name}_norm") for row in y])
        if position is None:
            return y
        angle = [position * self.frequency(i, d) for i in range(d // 2)]
        size = torch.full((d // 2,), self.rope_factor()).double()
        turn = torch.polar(size, torch.tensor(angle).double())
        y = torch.complex(y[:, : d // 2], y[:, d // 2 :]) * turn
        return torch.cat([y.real, y.imag], -1)

    def frequency(self, i: int, d: int) -> float:
        """Return the i-th frequency of RoPE of `d` dimensions, of type default, llama3 or yarn."""
        rope = self.c.rope_parameters
        plain = rope["rope_theta"] ** (-2 * i / d)
        if rope.get("rope_type", "default") == "default":
            return plain
        turns = rope["original_max_position_embeddings"] * plain / (2 * math.pi)
        if rope["rope_type"] == "yarn":
            channels = [  # whose turns within the original length are beta
                d / 2 * math.log(turns * rope["rope_theta"] ** (2 * i / d) / beta)
                / math.log(rope["rope_theta"])
                for beta in (rope["beta_fast"], rope["beta_slow"])
            ]  # fmt: skip
            first, last = max(math.floor(channels[0]), 0), min(math.ceil(channels[1]), d - 1)
            share = 1 - min(max((i - first) / (last - first), 0.0), 1.0)
            return share * plain + (1 - share) * plain / rope["factor"]
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        share = min(max((turns - low) / (high - low), 0.0), 1.0)  # 0: scaled; 1: unchanged
        return share * plain + (1 - share) * plain / rope["factor"]

    def rope_factor(self) -> float:
        """Return the factor of rotated queries and keys."""
        rope = self.c.rope_parameters
        return 1 + 0.1 * math.log(rope["factor"]) if rope.get("rope_type") == "yarn" else 1.0

    def attend(self, x: Tensor, layer: str, position: int, cache: Cache) -> tuple[Tensor, Cache]:
        """What o_proj gives, and the cache with this position's key and value."""
        prefix = f"{layer}.self_attn."
        cache = (*cache, (self.heads(x, prefix + "k", position), self.heads(x, prefix + "v", None)))
        window = self.options.get("sliding_window") or 0
        return self.attend_all(x, layer, position, cache[-window:]), cache

    def attend_all(self, x: Tensor, layer: str, position: int, cache: Cache) -> Tensor:
        """Return what o_proj gives for the query at `position` over all keys of the cache."""
        prefix, c = f"{layer}.self_attn.", self.c
        group, mixed = c.num_attention_heads // c.num_key_value_heads, []
        for n, query in enumerate(self.heads(x, prefix + "q", position)):
            keys = torch.stack([k[n // group] for k, _ in cache])
            values = torch.stack([v[n // group] for _, v in cache])
            mixed.append((keys @ query / math.sqrt(c.head_dim)).softmax(0) @ values)
        return self.w[prefix + "o_proj.weight"] @ torch.cat(mixed)

    def feed_forward(self, out: Tensor, layer: str) -> Tensor:
        return out + self.swiglu(self.norm(out, f"{layer}.post_attention_layernorm"), layer)

    def swiglu(self, y: Tensor, layer: str) -> Tensor:
        gate, up = (self.w[f"{layer}.mlp.{name}_proj.weight"] @ y for name in ("gate", "up"))
        return self.w[f"{layer}.mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up)

    def step(
        self, token: int, hidden: Tensor, position: int, caches: tuple[Cache, ...]
    ) -> tuple[Tensor, Tensor, tuple[Cache, ...]]:
        """What is fed back [H], draft logits [D], and the caches of all layers."""
        w, left = self.w, []
        embedding = w["embed_tokens.weight"][token]
        for number, cache in enumerate(caches):
            layer = f"layers.{number}"
            if number == 0 and self.eagle:
                residual = x = w["fc.weight"] @ torch.cat([embedding, hidden])
            elif number == 0:
                normed = self.norm(hidden, f"{layer}.hidden_norm")
                x = torch.cat([self.norm(embedding, f"{layer}.input_layernorm"), normed])
                residual = normed if self.options.get("norm_before_residual") else hidden
            else:
                residual, x = hidden, self.norm(hidden, f"{layer}.input_layernorm")
            attended, cache = self.attend(x, layer, position, cache)
            left.append(cache)
            hidden = self.feed_forward(residual + attended, layer)
        read = hidden if self.eagle else self.norm(hidden, "norm")
        return (
            read if self.options.get("norm_output") else hidden,
            w["lm_head.weight"] @ read,
            tuple(left),
        )


def read_export(folder: Path, shared: dict[str, Tensor]) -> tuple[PlainChain, Tensor]:
    """Return an exported head by servers §1 alone, and the target ids [D] of its drafts.

    Args:
        folder: an export of an EAGLE3, P-EAGLE or EAGLE head.
        shared: the target's tensors by their names in the head.
    """
    top = json.loads((folder / "config.json").read_text())
    layer = top.get("transformer_layer_config", top)
    tensors = dict(shared)
    for file in folder.glob("*.safetensors"):
        tensors |= {n.replace("midlayer.", "layers.0."): t for n, t in load_file(file).items()}
    eagle = top["architectures"] in (["LlamaForCausalLM"], ["LlamaForCausalLMEagle"])
    config = SimpleNamespace(
        **layer | top,
        family="eagle" if eagle else "eagle3",
        num_layers=layer["num_hidden_layers"],
        boundaries=top.get("eagle_aux_hidden_state_layer_ids"),
        qk_norm=layer["model_type"] == "qwen3",
    )
    ids = torch.arange(top["draft_vocab_size"]) + tensors.get("d2t", torch.tensor(0))
    return PlainChain({n: t.double() for n, t in tensors.items()}, config), ids


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
        scale = self.options.get("embedding_scale", 1.0)
        slots = [scale * self.w["embed_tokens.weight"][i] for i in ids]
        for number in range(self.c.num_layers):
            layer = f"layers.{number}"
            normed = [self.norm(u, f"{layer}.input_layernorm") for u in slots]
            inputs = [*context, *self.convolved(normed, normed, f"{layer}.attention_conv", 0)]
            prefix = f"{layer}.self_attn."
            cache = tuple(
                (self.heads(x, prefix + "k", p), self.heads(x, prefix + "v", None))
                for p, x in enumerate(inputs)
            )
            attended = [
                self.attend_all(
                    x, layer, len(context) + i, self.seen(cache, len(context), i, number)
                )
                for i, x in enumerate(inputs[len(context) :])
            ]
            slots = self.added(slots, attended, normed, f"{layer}.attention_conv")
            normed = [self.norm(u, f"{layer}.post_attention_layernorm") for u in slots]
            inputs = self.convolved(normed, normed, f"{layer}.mlp_conv", 0)
            outputs = [self.swiglu(x, layer) for x in inputs]
            slots = self.added(slots, outputs, normed, f"{layer}.mlp_conv")
        return [self.norm(u, "norm") for u in slots]

    def convolved(self, ys: list[Tensor], xs: list[Tensor], name: str, side: int) -> list[Tensor]:
        """Return ys [H] of a block's slots convolved by coefficients from xs; of DFlash2 alone."""
        if f"{name}.base_kernel" not in self.w:
            return ys
        base, project = self.w[f"{name}.base_kernel"], self.w[f"{name}.kernel_projection.weight"]
        size, groups = self.c.hidden_size, self.c.hidden_size // self.c.conv_group_size
        kernels = [
            base[side]
            + (project @ x).view(2, -1, groups)[side].repeat_interleave(size // groups, 1)
            for x in xs
        ]
        return [
            sum(kernel[tap] * ys[i - tap] for tap in range(min(i + 1, len(kernel))))
            for i, kernel in enumerate(kernels)
        ]

    def added(self, us: list, outputs: list, xs: list, name: str) -> list[Tensor]:
        """Return us plus the convolved outputs of a sublayer."""
        outputs = self.convolved(outputs, xs, name, 1)
        return [u + output for u, output in zip(us, outputs, strict=True)]

    def seen(self, cache: tuple, context: int, slot: int, layer: int) -> tuple:
        """Return the keys that a slot sees: a sliding layer's window ends with the slot's own."""
        last = context + slot + 1 if self.c.is_causal else len(cache)
        slides = self.c.layer_types is None or self.c.layer_types[layer] == "sliding_attention"
        window = self.c.sliding_window if slides else None
        first = 0 if window is None else max(0, context + slot + 1 - window)
        return cache[first:last]

    def logits(self, hidden: Tensor, previous: int) -> Tensor:
        """Return the logits [D] of a slot from its normed output and the token before its draft."""
        logits = self.w["lm_head.weight"] @ hidden
        if self.c.markov_rank:
            factor = self.w["markov_head.markov_w1.weight"][previous]
            logits = logits + self.w["markov_head.markov_w2.weight"] @ factor
        logits = logits * self.options.get("logit_scale", 1.0)
        cap = self.options.get("logit_softcap")
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def selector_scores(self, hidden: Tensor, previous: int, tokens: list[int]) -> Tensor:
        """Return the scores of tokens after the token `previous`, among which a DFlash2 head
        chooses."""
        first, second = (
            self.w[f"candidate_selector.{name}_codebook.weight"]
            for name in ("predecessor", "successor")
        )
        projected = self.w["candidate_selector.hidden_projection.weight"] @ hidden
        logits = self.logits(hidden, previous)
        return torch.stack(
            [logits[c] + (first[previous] * projected * second[c]).sum() for c in tokens]
        )

    def confidence(self, hidden: Tensor, previous: int) -> Tensor:
        """Return the logit of a draft's acceptance."""
        factor = self.w["markov_head.markov_w1.weight"][previous]
        proj = self.w["confidence_head.proj.weight"][0]
        return proj @ torch.cat([hidden, factor]) + self.w["confidence_head.proj.bias"][0]
