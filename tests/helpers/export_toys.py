"""A tiny target on disk, and exports of its heads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from draftlab.export import verify_export, write_export

HIDDEN, VOCAB, LAYERS, MAX_LENGTH = 32, 96, 5, 512
BOUNDARIES = (1, 2, 4, 5)
MASK = 11
PEAGLE = {"family": "peagle", "mask_token_id": MASK, "embeddings": "own", "num_layers": 2}
"""Fields of a parallel head."""
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MakeHead = Callable[..., Path]


def make_target(folder: Path, *, seed: int = 0, layers: int = LAYERS) -> Path:
    """Save a random Llama in bfloat16, whose embeddings are not tied to its lm_head."""
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
    """Call `write_export`, by default for a target called org/target."""
    return write_export(head, target, out, program, **({"target_name": "org/target"} | options))


def verify(out: Path, head: Path, target: Path, program: str = "speculators") -> None:
    """Call `verify_export`."""
    verify_export(out, head, target, program)


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.json."""
    return json.loads((folder / "config.json").read_text())


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of model.safetensors."""
    return load_file(folder / "model.safetensors")


def change_config(folder: Path, **keys: object) -> Path:
    """Change keys of config.json; `...` removes one."""
    config = read_config(folder) | keys
    text = json.dumps({key: value for key, value in config.items() if value is not ...})
    (folder / "config.json").write_text(text)
    return folder


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """Change the tensors of model.safetensors."""
    tensors = read_tensors(folder)
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
