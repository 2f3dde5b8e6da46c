"""Random heads of the toy target, and their exports."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftlab.export.layout import Export, layout_for
from draftlab.export.settings import ExportSettings
from draftlab.export.weight_files import floating_dtype
from draftlab.export.write import PlannedExport, write_export
from draftlab.heads.config import TargetIdentity
from draftlab.heads.folder import load_config, new_head, save_head
from draftlab.target_model.fingerprint import fingerprint
from draftlab.target_model.loading import load_tokenizer
from draftlab.target_model.settings import TargetSettings
from draftlab.text.chat_template import template_sha256, tokenizer_sha256
from tests.helpers import head_toys

HIDDEN, VOCAB, LAYERS, MAX_LENGTH = 32, 289, 6, 512
BOUNDARIES = (1, 3, 5)
DRAFT, MASK = 40, 11
PEAGLE = {"family": "peagle", "mask_token_id": MASK, "embeddings": "own", "num_layers": 2}
"""Fields of a parallel head."""
EAGLE = {"family": "eagle", "boundaries": (LAYERS,), "draft_vocab_size": VOCAB, "num_layers": 2}
"""Fields of a head of the first generation."""
LLAMA4 = head_toys.LLAMA4_HEAD | {
    "boundaries": (LAYERS,),
    "target_hidden_size": HIDDEN,
    "draft_vocab_size": VOCAB,
}
"""Fields of a dense Llama 4 head."""
DSPARK = {
    "family": "dspark",
    "num_layers": 2,
    "mask_token_id": MASK,
    "draft_vocab_size": VOCAB,
    "sample_from_anchor": True,
    "markov_rank": 6,
    "confidence": True,
}
DFLASH = DSPARK | {
    "family": "dflash",
    "sample_from_anchor": False,
    "markov_rank": 0,
    "confidence": False,
}
DFLASH2 = DFLASH | {
    "family": "dflash2",
    "conv_group_size": 4,
    "selector_rank": 6,
    "selector_top_k": 4,
}
"""Fields of block heads."""
LLAMA3 = head_toys.LLAMA3 | {"original_max_position_embeddings": 64}
YARN = head_toys.YARN | {"original_max_position_embeddings": 64}


def save_random_head(
    folder: Path, target: Path, *, dtype: torch.dtype = torch.bfloat16, **changes: object
) -> Path:
    """Save a head with large random weights: small ones would hide mistakes of RoPE and norms."""
    tokenizer = load_tokenizer(TargetSettings(path=str(target)))
    fields = {
        "boundaries": BOUNDARIES,
        "target_num_layers": LAYERS,
        "target_hidden_size": HIDDEN,
        "hidden_size": HIDDEN,
        "intermediate_size": 40,
        "num_attention_heads": 4,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0},
        "max_position_embeddings": MAX_LENGTH,
        "vocab_size": VOCAB,
        "draft_vocab_size": DRAFT,
        "k_trained": 7,
        "target": TargetIdentity(
            name=str(target),
            fingerprint=fingerprint(target),
            architecture="LlamaForCausalLM",
            tokenizer_sha256=tokenizer_sha256(tokenizer),
            template_sha256=template_sha256(tokenizer),
        ),
    }
    head = new_head(head_toys.make_config(**fields | changes))
    head_toys.randomise(head, 3, weights=0.3, norms=0.5)
    save_head(folder, head, dtype)
    return folder


def export(
    head: Path,
    target: Path,
    out: Path,
    program: str = "speculators",
    max_shard: str = "5GB",
    **options: object,
) -> Path:
    """Call `write_export` for a target called org/target, with files of at most `max_shard`.

    Args:
        options: of `plan_export`, and settings.
    """
    own = {name: options.pop(name) for name in [*options] if name in ExportSettings.model_fields}
    own |= {"calibration": str(own["calibration"])} if "calibration" in own else {}
    options = {"target_name": "org/target", "settings": ExportSettings(**own)} | options
    with patch("draftlab.export.weight_files.MAX_SHARD", max_shard):
        return write_export(head, target, out, program, **options)


@dataclass(frozen=True)
class ExportedHead:
    """A head, its target and an export of it."""

    head: Path
    target: Path
    folder: Path
    program: str

    @property
    def config(self) -> dict[str, Any]:
        return read_config(self.folder)

    @property
    def tensors(self) -> dict[str, Tensor]:
        return read_tensors(self.folder)

    @property
    def launch_text(self) -> str:
        return (self.folder / "launch.md").read_text()

    def verify(self) -> None:
        """Compare it with the head, as an export for org/target with the head's own K."""
        fields, dtype = load_config(self.head), floating_dtype(self.config["dtype"])
        target = read_config(self.target)
        export = Export(fields, target, "org/target", fields.k_trained, dtype)
        layout = layout_for(self.program, fields.family)
        PlannedExport(self.folder, layout, export, self.head, self.target).verify(self.folder)


ExportHead = Callable[..., ExportedHead]


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
