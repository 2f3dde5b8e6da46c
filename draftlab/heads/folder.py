"""A head on disk: draftlab.json (source of truth), model.safetensors, and a generated config.json.

config.json is the vLLM-native description generated from draftlab.json, so that vLLM loads the
folder as it stands; embeddings equal to the target's are left out there and here (vLLM shares the
target's, and so do we).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import Tensor

from draftlab.base import UserError, atomic_path, read_json, save_tensors, write_json
from draftlab.heads.config import HeadConfig
from draftlab.heads.eagle3 import Eagle3Head
from draftlab.heads.ptd import PtdHead

CONFIG, WEIGHTS, NATIVE = "draftlab.json", "model.safetensors", "config.json"
EMBEDDINGS = "embed_tokens.weight"


def new_head(config: HeadConfig) -> Eagle3Head:
    """A head of the family that `config` names, its values yet to be set."""
    return PtdHead(config) if config.family == "ptd" else Eagle3Head(config)


def native_config(config: HeadConfig, dtype: str) -> dict[str, Any]:
    """config.json in vLLM's native layout (CONTRACTS §8), a pure function of draftlab.json."""
    rope = dict(config.rope_parameters)
    rope.setdefault("rope_type", "default")
    scaling = {k: v for k, v in rope.items() if k != "rope_theta"}
    nested = [b - 1 for b in config.boundaries]  # SGLang counts outputs of layers
    # The name that becomes vLLM's class with norms of q and k; it has no other for these heads.
    architecture = "Eagle3Qwen3ForCausalLM" if config.qk_norm else "LlamaForCausalLMEagle3"
    mask = config.mask_token_id
    # Readers differ in the key they look for (CONTRACTS §1.5).
    names = ("mask_token_id", "ptd_token_id", "pard_token") if mask is not None else ()
    return {
        "architectures": [architecture],
        "model_type": "qwen3" if config.qk_norm else "llama",
        "dtype": dtype,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": config.num_layers,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": False,
        "mlp_bias": False,
        "bias": False,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "tie_word_embeddings": False,
        "target_hidden_size": config.target_hidden_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
        "rope_parameters": rope,
        "eagle_aux_hidden_state_layer_ids": list(config.boundaries),
        "num_aux_hidden_states": len(config.boundaries),
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": nested,
        },
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        **dict.fromkeys(names, mask),
    }


def head_tensors(head: Eagle3Head, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every tensor by its name in files, floating ones cast to `dtype`, on the CPU."""
    return {
        name: (t.to(dtype) if t.is_floating_point() else t).detach().cpu().contiguous()
        for name, t in head.tensors().items()
    }


def save_head(folder: Path, head: Eagle3Head, dtype: torch.dtype) -> None:
    """Writes the head folder; draftlab.json comes last, so a folder that has it is whole."""
    # An older head here is no head any more from the first changed file on.
    (folder / CONFIG).unlink(missing_ok=True)
    tensors = head_tensors(head, dtype)
    if head.config.embeddings == "target":
        del tensors[EMBEDDINGS]
    if head.config.draft_vocab_size == head.config.vocab_size:
        # A reader without a draft vocabulary has no place for the two maps (CONTRACTS §1.3).
        del tensors["d2t"], tensors["t2d"]
    with atomic_path(folder / WEIGHTS) as temporary:
        save_tensors(tensors, temporary, metadata={"format": "pt"})
    name = str(dtype).removeprefix("torch.")
    write_json(folder / NATIVE, native_config(head.config, name))
    write_json(folder / CONFIG, head.config.model_dump(mode="json", by_alias=True))


def load_config(folder: Path) -> HeadConfig:
    """Reads draftlab.json strictly."""
    fields = read_json(folder / CONFIG, kind="head's draftlab.json")
    try:
        return HeadConfig.model_validate(fields)
    except ValidationError as error:
        raise UserError(
            f"draftlab.json is not a head of this version: {error}", where=folder / CONFIG
        ) from None


def load_head(
    folder: Path, *, embeddings: Tensor | None, dtype: torch.dtype, device: torch.device | str
) -> Eagle3Head:
    """Loads a head for inference: a `PtdHead` where draftlab.json says so.

    Args:
        folder: the head folder.
        embeddings: the target's embeddings [V, H], used when the head ships none of its own.
        dtype: of floating tensors.
        device: where it runs.

    Raises:
        UserError: for missing, unknown or misshapen tensors, each named, or NaN.
    """
    config = load_config(folder)
    try:
        tensors = load_file(folder / WEIGHTS)
    except FileNotFoundError:
        raise UserError(
            "expected the head's weights, found nothing", where=folder / WEIGHTS
        ) from None
    except Exception as error:  # safetensors raises its own type for a truncated file
        raise UserError(
            f"the head's weights are unreadable: {error}",
            where=folder / WEIGHTS,
            do="remove this file and train again: the last checkpoint gives the same bytes",
        ) from None
    if config.embeddings == "target":
        if EMBEDDINGS in tensors:
            raise UserError(
                f'draftlab.json says "embeddings": "target", and the file holds {EMBEDDINGS}',
                where=folder / WEIGHTS,
                do='say "own" if these are the ones the head was trained with',
            )
        if embeddings is None:
            raise UserError(
                "the head uses its target's embeddings, and none were given", where=folder
            )
        tensors[EMBEDDINGS] = embeddings
    head = new_head(config)
    if config.draft_vocab_size == config.vocab_size:
        head.set_draft_vocabulary(torch.arange(config.vocab_size))
        tensors |= {"d2t": head.d2t, "t2d": head.t2d}
    check_tensors(head, tensors, folder / WEIGHTS)
    head.load_tensors(tensors)
    members = torch.nonzero(head.t2d).flatten()
    if not torch.equal(members, torch.arange(len(head.d2t)) + head.d2t):
        raise UserError(
            "d2t must hold offsets (target id − draft id) that agree with t2d; it does not",
            where=folder / WEIGHTS,
            do="a file with absolute ids in d2t was written by another program: import it instead",
        )
    return head.to(device=device, dtype=dtype).eval().requires_grad_(False)


def check_tensors(head: Eagle3Head, tensors: dict[str, Tensor], where: Path) -> None:
    """Raises a `UserError` that lists every missing, unknown, misshapen or non-finite tensor."""
    expected = head.tensors()
    faults = [f"missing {name}" for name in expected.keys() - tensors.keys()]
    faults += [f"unknown {name}" for name in tensors.keys() - expected.keys()]
    for name in expected.keys() & tensors.keys():
        if expected[name].shape != tensors[name].shape:
            faults.append(
                f"{name}: expected shape {list(expected[name].shape)}, "
                f"found {list(tensors[name].shape)}{_of_boundaries(head.config, name)}"
            )
        elif tensors[name].is_floating_point() and not bool(tensors[name].isfinite().all()):
            faults.append(f"{name}: not finite")
    if faults:
        raise UserError(
            "the head's tensors do not fit:\n  " + "\n  ".join(sorted(faults)), where=where
        )


def _of_boundaries(config: HeadConfig, name: str) -> str:
    """Where the expected width comes from, of a tensor that reads features."""
    if name not in ("fc.weight", "mask_hidden"):
        return ""
    count, size = len(config.boundaries), config.target_hidden_size
    return f" ({count} boundaries of {size} are {config.feature_size} wide)"
