"""LoRA adapters: a checkpoint with an adapter's weights merged, made once and kept in the cache.

    W' = W + s · B A, with s = alpha / r, or alpha / √r for rank-stabilised LoRA

Reference: Hu et al. 2021 (arXiv:2106.09685); adapter_config.json and its tensors are peft's.
"""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from draftlab.errors import UserError
from draftlab.files import cache_folder, moved_into, read_fields, sha256_file, sha256_text
from draftlab.formatting import is_positive
from draftlab.target_model.fingerprint import fingerprint
from draftlab.target_model.parts import shard_files, without_wrappers

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_BY_PEFT = "merge it with peft (merge_and_unload), save the model, and name it as target.path"
_PREFIX = "base_model.model."
_ALWAYS = {"peft_type": "LORA", "use_dora": False, "fan_in_fan_out": False, "lora_bias": False}
"""Fields whose other values change what an adapter computes."""
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights that leave the base model's weights as they are."""
_PLAIN_PATTERN = re.compile(r"[\w.^\\-]*")
"""Patterns of module names that no name can make slow."""


def merged_folder(base: Path, adapter: Path) -> Path:
    """Return the folder of a checkpoint with an adapter's weights, which is made if need be.

    Files are merged one by one, so that all tensors of a checkpoint stay, its MTP layer's too, and
    none of its code runs. Raises a `UserError` if the adapter is none of this checkpoint, or of an
    unknown kind.
    """
    config, weights = read_adapter(adapter)
    identity = f"{fingerprint(base)} {sha256_file(adapter / CONFIG)} {sha256_file(weights)}"
    folder = cache_folder() / "adapters" / f"{adapter.resolve().name}-{sha256_text(identity)[:16]}"
    if (folder / "config.json").is_file():
        return folder
    changes = _changes(config, load_file(weights), adapter)
    with moved_into(folder) as work:
        used: set[str] = set()
        for shard in shard_files(base):
            tensors = load_file(shard)
            for name in tensors:
                if (key := without_wrappers(name)) in changes:
                    tensors[name] = _changed(tensors[name], changes[key], name, adapter)
                    used.add(key)
            save_file(tensors, work / shard.name, {"format": "pt"})
        if missing := sorted(changes.keys() - used):
            raise UserError(
                f"expected an adapter of the target, found one that changes {len(missing)} tensors "
                f"that the target does not have, such as {missing[0]}",
                where=adapter,
                do=f"name its base model as target.path ({config.get('base_model_name_or_path')})",
            )
        for path in base.iterdir():
            if path.is_file() and path.suffix != ".safetensors":
                shutil.copy(path, work / path.name)
    return folder


def read_adapter(adapter: Path) -> tuple[dict[str, Any], Path]:
    """Return the config and the file of the weights; raise a `UserError` if it is no LoRA adapter,
    or of an unknown kind.
    """
    if not (adapter / CONFIG).is_file() or not (adapter / WEIGHTS).is_file():
        raise UserError(
            f"expected a LoRA adapter, a folder with {CONFIG} and {WEIGHTS}, found none",
            where=adapter,
            do="name the folder that peft's save_pretrained wrote",
        )
    config = read_fields(adapter / CONFIG, {}, kind=f"LoRA {CONFIG}")
    wrong = [
        f"{key} {expected}, found {config[key]}"
        for key, expected in _ALWAYS.items()
        if (config.get(key) or expected) != expected
    ]
    if (start := config.get("init_lora_weights")) not in _PLAIN_STARTS:
        wrong.append(f"init_lora_weights true, found {start}")  # it changes the base's weights
    if config.get("alora_invocation_tokens"):
        wrong.append("no alora_invocation_tokens, found some")
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        wrong.append(f"alpha_pattern by module, found {patterns!r}")
        patterns = {}
    for pattern in patterns:
        if not _PLAIN_PATTERN.fullmatch(pattern):
            wrong.append(f"names of modules in alpha_pattern, found {pattern}")
    for alpha in (config.get("lora_alpha", 8), *patterns.values()):
        if not is_positive(alpha):
            wrong.append(f"a positive number as alpha, found {alpha!r}")
    if wrong:
        raise UserError(
            f"expected {wrong[0]}: draftlab merges plain LoRA only",
            where=adapter / CONFIG,
            do=_BY_PEFT,
        )
    return config, adapter / WEIGHTS


def _changes(
    config: dict[str, Any], tensors: dict[str, Tensor], adapter: Path
) -> dict[str, Tensor | tuple[Tensor, Tensor, float]]:
    """Return what changes a tensor of the target: its replacement, or (A, B, s)."""
    changes: dict[str, Tensor | tuple[Tensor, Tensor, float]] = {}
    for name, tensor in tensors.items():
        module, _, part = name.removeprefix(_PREFIX).partition(".lora_")
        key = without_wrappers(module.replace(".modules_to_save.default", ""))
        if part == "A.weight":
            other = tensors.get(name.replace(".lora_A.", ".lora_B."))
            if other is not None:
                scale = _scale(config, module, tensor.shape[0])
                changes[f"{key}.weight"] = tensor, other, scale
                continue
        elif part == "B.weight" and name.replace(".lora_B.", ".lora_A.") in tensors:
            continue
        elif not part and name.startswith(_PREFIX):
            changes[key] = tensor
            continue
        raise UserError(
            f"expected pairs lora_A and lora_B, and whole tensors, found {name}",
            where=adapter / WEIGHTS,
            do=_BY_PEFT,
        )
    return changes


def _scale(config: dict[str, Any], module: str, rank: int) -> float:
    alpha = config.get("lora_alpha", 8)
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if re.search(rf"(^|\.){pattern}$", module):
            alpha = value
            break
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _changed(
    weight: Tensor, change: Tensor | tuple[Tensor, Tensor, float], name: str, adapter: Path
) -> Tensor:
    """Return a changed tensor of the target, in its dtype."""
    if weight.dtype.itemsize < 2 or not weight.is_floating_point():
        raise UserError(
            f"expected {name} in 16 or 32 bits, found {weight.dtype}: an adapter is merged with "
            "weights that are not quantised",
            where=adapter,
            do="name the target in 16 bits as target.path",
        )
    if isinstance(change, Tensor):
        new = change
    else:
        a, b, scale = change
        new = scale * (b.float() @ a.float())
    if new.shape != weight.shape:
        raise UserError(
            f"expected {name} in shape {list(weight.shape)}, found {list(new.shape)}",
            where=adapter,
            do="name the target that the adapter was trained for",
        )
    if not isinstance(change, Tensor):
        new = weight.float() + new
    return new.to(weight.dtype).contiguous()
