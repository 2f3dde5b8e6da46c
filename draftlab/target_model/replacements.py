"""What has to change in transformers' models so that rows of different lengths share a pass.

Most layers take a token's position from `position_ids` and need nothing. Found in the causal
language models of transformers 5.23, whose uses of a cache's length, of `arange` and of a maximum
of positions outside masks were read one by one:

| model | what it does | here |
|---|---|---|
| Llama 4 | attention temperature from the cache's length | replaced (`target_model/llama4.py`) |
| RoPE `longrope` (Phi 3, Phi 4, MiniCPM 3) | frequencies by the longest row | short set, limit |
| RoPE `dynamic` | frequencies grow with the longest row | frozen |
| PhiMoE with `longrope` | the same in a way of its own, on the host | refused |
| Ministral 3, Mistral 4 | attention temperature from `position_ids` | right as it is |
| Qwen3-Next, MiniMax, LFM2, Mamba … | a state that cannot be rolled back | refused |
| OPT, BioGPT, BART … | learned positions from the cache's length | refused |

Refusals that name no class come from `target_model/probe.py`, which looks at what a model does (so
it covers code shipped with a checkpoint too), or from `target_model/parts.py`.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from draftlab.errors import UserError
from draftlab.target_model.experts import use_experts
from draftlab.target_model.parts import text_decoder

_OWN_LONGROPE = ("PhimoeRotaryEmbedding",)


def replace_layers(model: PreTrainedModel) -> None:
    """Prepares a loaded model for decoding rows of different lengths, in place.

    `model.config` becomes a copy when the positions that the model can be trusted with are fewer
    than it states (longrope); the config objects that layers hold are never changed.

    Raises:
        UserError: for a layer that is known to mix rows and has no replacement.
    """
    decoder, layers, _ = text_decoder(model)
    if type(decoder).__name__ == "Llama4TextModel":
        from draftlab.target_model.llama4 import position_layers

        position_layers(layers)
    limit = freeze_rope(decoder)
    if limit is not None:
        model.config = copy.deepcopy(model.config)
        model.config.get_text_config().max_position_embeddings = limit
    use_experts(model)


def freeze_rope(decoder: nn.Module) -> int | None:
    """Stops rotary embeddings from following the longest row of a batch.

    `dynamic` frequencies are the initial ones up to `max_position_embeddings`, so they stay at
    those. `longrope` has two sets, and a sequence that grows from one to the other needs all its
    keys anew; we keep the short set, which is right up to `original_max_position_embeddings`.

    Returns:
        Positions the frozen embeddings are right for, when they are fewer than the config states.

    Raises:
        UserError: for an embedding that switches in a way of its own.
    """
    limits = []
    for module in decoder.modules():
        kinds: Any = getattr(module, "rope_type", None)
        by_layer = kinds if isinstance(kinds, dict) else {None: kinds}
        for layer, kind in by_layer.items():
            if kind != "longrope":
                continue
            if type(module).__name__ in _OWN_LONGROPE:
                raise UserError(
                    f"{type(module).__name__} with longrope chooses its scale by the longest row "
                    "of a batch, on the host: draftlab has no replacement for it",
                    do="use another target, or add one to draftlab/target_model/replacements.py",
                )
            rope = (
                module.config.rope_parameters
                if layer is None
                else (module.config.rope_parameters[layer])
            )
            limits.append(int(rope["original_max_position_embeddings"]))
        frozen = {
            layer: "default" if kind == "longrope" or "dynamic" in (kind or "") else kind
            for layer, kind in by_layer.items()
        }
        if frozen != by_layer:
            module.rope_type = frozen if isinstance(kinds, dict) else frozen[None]
    return min(limits, default=None)
