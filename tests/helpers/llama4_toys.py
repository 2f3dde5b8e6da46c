"""The shape of small dense Llama 4 drafters."""

from __future__ import annotations

LLAMA4_ATTENTION = {
    "no_rope_layers": (1, 0),
    "attention_chunk_size": 5,
    "use_qk_norm": True,
    "attn_temperature_tuning": True,
    "floor_scale": 3,
    "attn_scale": 0.5,
}
LLAMA4_HEAD: dict[str, object] = {
    "family": "eagle_llama4",
    "boundaries": (5,),
    "target_hidden_size": 24,
    "draft_vocab_size": 50,
    "num_layers": 2,
    "llama4": LLAMA4_ATTENTION,
}
