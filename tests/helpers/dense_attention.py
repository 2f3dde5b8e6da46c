"""Passes of a head over a whole sequence, with dense attention and no cache.

Those of a dense Llama 4 head go through transformers' layers, too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Llama4TextConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextModel

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
            x, residual = head.layer_inputs(head.embed_at(tokens, positions), hidden)
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


def llama4_pass(
    config: dict[str, Any], tensors: dict[str, Tensor], tokens: Tensor, hidden: Tensor
) -> Tensor:
    """Return the outputs [T, H] of a dense Llama 4 head's files, by transformers' layers.

    Args:
        config, tensors: of an EagleLlama4 checkpoint, as vLLM reads it (servers §1.2).
        hidden: [T, H], from `project_features`.
    """
    chunk = {"attention_chunk_size": config["attention_chunk_size"] or len(tokens)}
    fields = Llama4TextConfig(**config | chunk)
    fields._attn_implementation = "eager"
    model = Llama4TextModel(fields).double().eval()
    own = {name: t for name, t in tensors.items() if name.startswith(("layers", "norm"))}
    left = model.load_state_dict(own, strict=False)
    assert (left.missing_keys, left.unexpected_keys) == (["embed_tokens.weight"], [])
    read = torch.cat([tensors["embed_tokens.weight"][tokens].double(), hidden], -1)
    fed = read @ tensors["fc.weight"].double().t()
    with torch.no_grad():
        return model(inputs_embeds=fed[None], use_cache=False).last_hidden_state[0]
