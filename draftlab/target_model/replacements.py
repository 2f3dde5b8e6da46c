"""Replace what keeps rows of different lengths from sharing a forward pass in transformers' models.

Most layers take a token's position from `position_ids` and need no change. The table lists the
exceptions among the causal language models of transformers 5.23, from a reading of every use of a
cache length, of `arange` and of a maximum of positions outside masks:

| model | what it does | here |
|---|---|---|
| Llama 4 | attention temperature from the cache length | `use_true_positions` |
| RoPE `longrope` (Phi 3, Phi 4, MiniCPM 3) | frequencies by the longest row | short set, limit |
| RoPE `dynamic` | frequencies grow with the longest row | frozen |
| PhiMoE with `longrope` | the same in its own code, on the host | refused |
| Ministral 3, Mistral 4 | attention temperature from `position_ids` | correct |
| Qwen3-Next, Nemotron-H, LFM2, Jamba … | a recurrent state | kept by row (`recurrent_layer.py`) |
| Nemotron-H | a lower limit of time steps in prompts alone | as in its config and in vLLM |
| MiniMax, RecurrentGemma, RWKV | a state outside transformers' caches | refused |
| OPT, BioGPT, BART … | learned positions from the cache length | refused |

Refusals that name no class come from `target_model/check_capabilities.py`, which tests what a model
does (and so covers code shipped with a checkpoint), or from `target_model/parts.py`.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftlab.errors import UserError
from draftlab.target_model.attention import current_inputs
from draftlab.target_model.experts import use_experts
from draftlab.target_model.parts import text_decoder
from draftlab.target_model.recurrent_layer import replace_recurrences

_UNSUPPORTED_LONGROPE = ("PhimoeRotaryEmbedding",)


def replace_layers(model: PreTrainedModel) -> None:
    """Prepare a loaded model for rows of different lengths, in place.

    `model.config` becomes a copy with a lower limit if frozen RoPE is valid for fewer positions.
    Raises a `UserError` if a layer is known to mix rows and has no replacement.
    """
    decoder, layers, _ = text_decoder(model)
    if type(decoder).__name__ == "Llama4TextModel":
        use_true_positions(layers)
    limit = freeze_rope(decoder)
    if limit is not None:
        model.config = copy.deepcopy(model.config)
        model.config.get_text_config().max_position_embeddings = limit
    use_experts(model)
    replace_recurrences(decoder)
    for module in decoder.modules():
        if type(module).__name__ == "NemotronHMamba2Mixer":
            module.time_step_limit = tuple(decoder.config.time_step_limit)


def use_true_positions(layers: nn.ModuleList) -> None:
    """Compute Llama 4's attention temperature from the true position of every token.

    Layers without RoPE scale their queries by 1 + a · log(1 + ⌊(p + 1) / f⌋), f = 8,192.
    transformers derives p from the cache length, one number for all rows, so from position 8,191 on
    a row's logits would depend on the other rows of the batch. Padding, whose position is 0, is
    scaled by 1.
    """
    for layer in layers:
        attention = layer.self_attn
        if attention.attn_temperature_tuning and not attention.use_rope:
            attention.attn_temperature_tuning = False
            scale = partial(_temper, attention.floor_scale, attention.attn_scale)
            attention.q_proj.register_forward_hook(scale)


def _temper(floor: float, scale: float, _: nn.Module, inputs: Any, queries: Tensor) -> Tensor:
    """Return the queries [B, M, width] of a layer, scaled by their positions."""
    current = current_inputs()
    positions = current.packed_row.positions if current.packed_row else current.positions
    if positions is None:
        positions = torch.arange(queries.shape[1])[None]
    steps = torch.floor((positions.to(queries.device).float() + 1.0) / floor)
    factors = torch.log1p(steps) * scale + 1.0
    return (queries * factors[..., None]).to(queries.dtype)


def freeze_rope(decoder: nn.Module) -> int | None:
    """Stop rotary embeddings from depending on the longest row of a batch.

    `dynamic` frequencies equal the initial ones up to `max_position_embeddings`, so those are kept.
    `longrope` has two sets, and a sequence that grows from one to the other needs new keys
    throughout; the short set is kept, which is valid up to `original_max_position_embeddings`, the
    returned limit (None: that of the config). Raises a `UserError` if an embedding changes its
    frequencies in its own code.
    """
    limits = []
    for module in decoder.modules():
        rope_type: Any = getattr(module, "rope_type", None)
        by_layer = rope_type if isinstance(rope_type, dict) else {None: rope_type}
        for layer, kind in by_layer.items():
            if kind != "longrope":
                continue
            if type(module).__name__ in _UNSUPPORTED_LONGROPE:
                raise UserError(
                    f"{type(module).__name__} with longrope chooses its scale by the longest row "
                    "of a batch, on the host: draftlab has no replacement for it",
                    do="use another target, or add one to draftlab/target_model/replacements.py",
                )
            parameters = module.config.rope_parameters
            rope = parameters if layer is None else parameters[layer]
            limits.append(int(rope["original_max_position_embeddings"]))
        frozen = {
            layer: "default" if kind == "longrope" or "dynamic" in (kind or "") else kind
            for layer, kind in by_layer.items()
        }
        if frozen != by_layer:
            module.rope_type = frozen if isinstance(rope_type, dict) else frozen[None]
    return min(limits, default=None)
