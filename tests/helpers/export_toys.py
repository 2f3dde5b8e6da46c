"""A tiny target on disk for the export's tests."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from draftlab.export import write_export, verify_export

HIDDEN, VOCAB, LAYERS, MAX_LENGTH = 32, 96, 5, 512
BOUNDARIES = (1, 2, 4, 5)
MASK = 11
PEAGLE = {"family": "peagle", "mask_token_id": MASK, "embeddings": "own", "num_layers": 2}
"""What makes a parallel head of `make_head`'s."""


def make_target(folder: Path, *, seed: int = 0, layers: int = LAYERS) -> Path:
    """A random Llama, bfloat16, embeddings not tied to its lm_head."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=False,
        initializer_range=0.3,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def export(
    head: Path, target: Path, out: Path, program: str = "speculators", **options: object
) -> Path:
    """`write_export` for a target called org/target, unless `options` say otherwise."""
    return write_export(head, target, out, program, **({"target_name": "org/target"} | options))


def verify(out: Path, head: Path, target: Path, program: str = "speculators") -> None:
    """`verify_export`."""
    verify_export(out, head, target, program)
