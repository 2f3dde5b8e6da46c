"""Quantised checkpoints: what their configs say, and weights that transformers cannot read.

transformers (5.23) knows no checkpoint of NVIDIA's Model Optimizer, and of NVFP4 experts of
compressed-tensors it leaves out the factor of the whole tensor. A weight is a value times its
block's factor, times a factor of the tensor:

                        values                        factors of blocks   of the tensor
    compressed-tensors  M.weight_packed, M.weight     M.weight_scale      1 / M.weight_global_scale
    Model Optimizer     M.weight                      M.weight_scale      M.weight_scale_2

NVFP4 has blocks of 16 with factors in float8, MXFP4 of 32 with an exponent (plus 127). Both have
two E2M1 values in a byte, the first in its low bits. Weights in float8 have a factor for all or
for each row.

Reference: compressed-tensors 0.20, compressors/nvfp4; NVIDIA, "Introducing NVFP4" (2025).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from draftlab.errors import UserError
from draftlab.target_model.parts import shard_files, without_wrappers

VLLM_ADVICE = (
    "let vLLM answer and record (draftlab train with regenerate.backend=vllm record.backend=vllm), "
    "and measure the head there"
)
_ALGORITHMS = ("NVFP4", "FP8")
"""Of Model Optimizer's, those that this module reads."""
_PACKED = ("nvfp4-pack-quantized", "mxfp4-pack-quantized")
_PLAIN = "float-quantized"
"""Formats of compressed-tensors; the last is only read beside one of the others."""
_VALUES = ("weight", "weight_packed")
_DROPPED = (
    "weight_scale",
    "weight_scale_2",
    "weight_global_scale",
    "input_scale",
    "input_global_scale",
    "k_scale",
    "v_scale",
)
"""Factors of weights, and those of activations and KV caches, which are not quantised here."""
_FACTOR = re.compile(r"(weight|_proj)_scale(_inv|_2)?$")
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_BYTES = torch.stack(
    torch.meshgrid(*[torch.cat([_E2M1, -_E2M1])] * 2, indexing="ij")[::-1], -1
).flatten(0, 1)
"""The two values of each byte."""


def quantisation_fields(config: Any) -> dict[str, Any]:
    """Return the quantisation in a target's config; empty: its weights are not quantised."""
    for part in (config, config.get_text_config()):
        if found := getattr(part, "quantization_config", None):
            return dict(found if isinstance(found, Mapping) else found.to_dict())
    return {}


def format_name(fields: Mapping[str, Any]) -> str:
    """Return what a user calls a quantisation, such as "modelopt NVFP4"."""
    names = (fields.get(key) for key in ("quant_method", "quant_algo", "format"))
    return " ".join(str(name) for name in names if name)


def is_dequantised_here(fields: Mapping[str, Any]) -> bool:
    """Return whether `read_weights` reads this quantisation."""
    if fields.get("quant_method") == "modelopt":
        return fields.get("quant_algo") in _ALGORITHMS
    groups = [group for group in _groups(fields) if group.get("weights")]
    formats = {group.get("format") or fields.get("format") for group in groups}
    return (
        fields.get("quant_method") == "compressed-tensors"
        and not fields.get("transform_config")  # rotations of states
        and not formats.isdisjoint(_PACKED)
        and formats <= {*_PACKED, _PLAIN}
    )


def weight_bits(fields: Mapping[str, Any]) -> float | None:
    """Return the bits of a quantised weight, with the factor of its block; None: not known."""
    method = str(fields.get("quant_method"))
    bits = fields.get("bits") or {"NVFP4": 4, "FP8": 8}.get(str(fields.get("quant_algo")))
    if method == "bitsandbytes":
        bits = 4 if fields.get("load_in_4bit") else 8
    elif method == "compressed-tensors":
        found = [(group.get("weights") or {}).get("num_bits") for group in _groups(fields)]
        bits = max(filter(None, found), default=None)
    bits = bits or {"fp8": 8, "fbgemm_fp8": 8, "mxfp8": 8, "mxfp4": 4}.get(method)
    return bits if bits is None or bits > 4 else bits + 0.5


def check_files(folder: Path, fields: Mapping[str, Any]) -> None:
    """Check the layout of a quantised checkpoint, by names, shapes and dtypes alone.

    Raises:
        UserError: factors stand beside no weight, so that transformers would leave them out (it
            writes experts in float8 so); or `read_weights` should read another layout.
    """
    kinds = _dtypes(folder) if fields else {}
    for name in kinds:
        weight = _FACTOR.sub(r"\1", name)
        if weight != name and weight not in kinds and f"{weight}_packed" not in kinds:
            raise UserError(
                f"expected a weight for its factors, found {name} without {weight}: transformers "
                "would leave the factors out",
                where=folder,
                do=f"use the checkpoint in 16 bits, or {VLLM_ADVICE}",
            )
    if not is_dequantised_here(fields):
        return
    found: dict[str, str] = {}
    for name, (dtype, shape) in kinds.items():
        module, _, part = name.rpartition(".")
        scale = kinds.get(f"{module}.weight_scale")
        if scale is None:
            if dtype in ("U8", "F8_E4M3", "F8_E5M2"):
                found[name] = dtype
        elif part in _VALUES:
            if not _fits(dtype, shape, *scale):
                found[name] = f"{dtype} {shape} with factors {scale[0]} {scale[1]}"
            if without_wrappers(module) in ("embed_tokens", "lm_head"):
                found[name] = "quantised, and heads are made of it"
        elif part not in (*_DROPPED, "bias"):
            found[name] = dtype
    if found:
        name, what = next(iter(found.items()))
        raise UserError(
            "expected NVFP4, MXFP4 or FP8 weights with a factor for each block, row or tensor, "
            f"found {name}: {what}",
            where=folder,
            do=f"use the checkpoint in 16 bits, or {VLLM_ADVICE}",
        )


def check_blocks(folder: Path, fields: Mapping[str, Any]) -> None:
    """Check that blocks with a factor each divide the matrices whose weights were dequantised.

    transformers (5.23) takes equal blocks, and with a smaller last block gives wrong weights.

    Raises:
        UserError: they do not divide a matrix.
    """
    if not (block := fields.get("weight_block_size")):
        return
    kinds = _dtypes(folder)
    for name in (name for name in kinds if name.endswith("_scale_inv")):
        weight = name.removesuffix("_scale_inv")
        shape = kinds[weight][1]
        if any(size % side for size, side in zip(shape[-2:], block, strict=True)):
            raise UserError(
                f"expected matrices of whole blocks of {block[0]} × {block[1]}, found {weight} of "
                f"{shape}: transformers dequantises those wrongly",
                where=folder,
                do="use a GPU with a kernel for them, or the checkpoint in 16 bits",
            )


def read_weights(folder: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """Read a checked checkpoint's tensors under the names that they had before they were quantised.

    Returns:
        Weights in `dtype`, rounded once from float32, and what was not quantised as it is.
    """
    tensors: dict[str, Tensor] = {}
    for file in shard_files(folder):
        with safe_open(file, "pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    plain = {}
    for name in list(tensors):
        module, _, part = name.rpartition(".")
        scale = tensors.get(f"{module}.weight_scale")
        if scale is None:
            plain[name] = tensors[name]
        elif part in _VALUES:
            divisor = tensors.get(f"{module}.weight_global_scale")
            factor = tensors.get(f"{module}.weight_scale_2")
            weight = dequantise(tensors.pop(name), scale, factor, divisor)
            plain[f"{module}.weight"] = weight.to(dtype)
        elif part not in _DROPPED:
            plain[name] = tensors[name]
    return plain


def dequantise(
    values: Tensor, scale: Tensor, factor: Tensor | None = None, divisor: Tensor | None = None
) -> Tensor:
    """Return plain weights in float32.

    Args:
        values: uint8 [R, C / 2], or float8 [R, C].
        scale: factors of blocks, float8 or, of MXFP4, uint8 [R, C / block]; of float8 values [],
            [1] or [R, 1].
        factor, divisor: of the whole tensor.
    """
    scale = torch.exp2(scale.float() - 127) if scale.dtype == torch.uint8 else scale.float()
    if factor is not None:
        scale = scale * factor.float()
    if divisor is not None:
        scale = scale / divisor.float()
    if values.dtype != torch.uint8:
        return values.float() * scale
    pairs = _BYTES[values.int()].flatten(-2)  # [R, C]
    return (pairs.unflatten(-1, (scale.shape[-1], -1)) * scale[..., None]).flatten(-2)


def _groups(fields: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the groups of layers of a config of compressed-tensors."""
    groups = fields.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        if isinstance(group, Mapping):
            yield group


def _dtypes(folder: Path) -> dict[str, tuple[str, list[int]]]:
    """Return the dtype and shape of each tensor of a checkpoint."""
    kinds = {}
    for file in shard_files(folder):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                one = opened.get_slice(name)
                kinds[name] = one.get_dtype(), one.get_shape()
    return kinds


def _fits(dtype: str, shape: list[int], scale_dtype: str, scale_shape: list[int]) -> bool:
    """Return whether `dequantise` takes values and factors of these dtypes and shapes."""
    if dtype == "F8_E4M3":
        return scale_shape in ([], [1], [shape[0], 1])
    block = {"F8_E4M3": 16, "U8": 32}.get(scale_dtype)
    return (
        dtype == "U8"
        and block is not None
        and len(shape) == 2
        and scale_shape == [shape[0], 2 * shape[1] // block]
        and 2 * shape[1] % block == 0
    )
