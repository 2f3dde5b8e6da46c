"""Heads of the toy target, and changes to what other programs would read of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from draftlab.heads.config import HeadConfig, TargetIdentity
from draftlab.heads.folder import new_head, save_head
from draftlab.progress import Monitor
from draftlab.target_model.fingerprint import fingerprint
from draftlab.target_model.model import TargetSettings, load_tokenizer
from draftlab.text.render import template_sha256, tokenizer_sha256

LAYERS, HIDDEN, VOCAB, POSITIONS = 6, 64, 289, 512
BOUNDARIES = (1, 3, 5)


class Ears(Monitor):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


def make_head(
    folder: Path, target: Path, *, dtype: torch.dtype = torch.bfloat16, **changed
) -> Path:
    """A loud random head of the toy target's."""
    tokenizer = load_tokenizer(TargetSettings(path=str(target)))
    fields = {
        "boundaries": BOUNDARIES,
        "target_num_layers": LAYERS,
        "target_hidden_size": HIDDEN,
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0},
        "max_position_embeddings": POSITIONS,
        "vocab_size": VOCAB,
        "draft_vocab_size": 100,
        "k_trained": 7,
        "target": TargetIdentity(
            name=str(target),
            fingerprint=fingerprint(target),
            architecture="LlamaForCausalLM",
            tokenizer_sha256=tokenizer_sha256(tokenizer),
            template_sha256=template_sha256(tokenizer),
        ),
        **changed,
    }
    head = new_head(HeadConfig(**fields))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    size = head.config.draft_vocab_size
    head.set_draft_vocabulary(torch.randperm(VOCAB, generator=generator)[:size].sort().values)
    save_head(folder, head, dtype)
    return folder


def change(folder: Path, **keys: object) -> Path:
    """Changes keys of config.json; `...` removes one."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | keys
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
    return folder


def change_tensors(folder: Path, act: Callable[[dict], None]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    act(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
