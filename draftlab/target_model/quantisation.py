"""Quantised checkpoints: what their configs say, weights that are dequantised here, and back.

transformers (5.23) knows no checkpoint of NVIDIA's Model Optimizer, leaves out a factor of NVFP4
experts, needs further packages for float8, and quantises activations, whose rounding makes states
depend on the shape of a pass. A weight is a value times its block's factor, times a factor of the
tensor:

                        values                      factors of blocks   of the tensor
    DeepSeek's FP8      M.weight                    M.weight_scale_inv
    compressed-tensors  M.weight_packed, M.weight   M.weight_scale      1 / M.weight_global_scale
    Model Optimizer     M.weight                    M.weight_scale      M.weight_scale_2

NVFP4 has blocks of 16 with factors in float8, MXFP4 of 32 with an exponent (plus 127). Both have
two E2M1 values in a byte, the first in its low bits. Weights of 8 bits have a factor for all, for
each row, or for each block of a matrix, of which the last ones may be smaller.

Reference: compressed-tensors 0.20, compressors/nvfp4; NVIDIA, "Introducing NVFP4" (2025);
DeepSeek-V3, inference/kernel.py.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from draftlab.errors import UserError
from draftlab.files import read_fields
from draftlab.kernels.fp8_linear import E4M3, LARGEST_E4M3
from draftlab.target_model.parts import (
    meta_tensor,
    read_tensor,
    shard_files,
    tensor_files,
    without_wrappers,
)

T = TypeVar("T")
Kind = tuple[str, list[int]]
"""The dtype and shape of a stored tensor."""

VLLM_ADVICE = (
    "let vLLM answer and record (draftlab train with regenerate.backend=vllm record.backend=vllm), "
    "and measure the head there"
)
_ALGORITHMS = ("NVFP4", "FP8")
"""Of Model Optimizer's, those that this module reads."""
_PACKED = ("nvfp4-pack-quantized", "mxfp4-pack-quantized")
_PLAIN = ("float-quantized", "int-quantized", "naive-quantized")
"""Formats of compressed-tensors."""
_FACTOR = re.compile(r"(.*(?:weight|_proj))_(scale|scale_inv|scale_2|global_scale)")
_LAYER = re.compile(r"\blayers\.(\d+)\.")
_DROPPED = re.compile(r".*\.(input|output|activation|[qkv])_(global_)?scale")
"""Factors of activations and of KV caches, which are not quantised here."""
_LARGEST_ROUNDED = 464
"""The largest number that is rounded to one of E4M3."""
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
    method = fields.get("quant_method")
    if method == "modelopt":
        return fields.get("quant_algo") in _ALGORITHMS
    groups = [group for group in _groups(fields) if group.get("weights")]
    return method == "fp8" or (
        method == "compressed-tensors"
        and not fields.get("transform_config")  # rotations of states
        and bool(groups)
        and all(
            _has_only_scales(g["weights"], g.get("format") or fields.get("format")) for g in groups
        )
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
    factors = _factors(kinds)
    for weight, of_weight in factors.items():
        if weight not in kinds and f"{weight}_packed" not in kinds:
            raise UserError(
                f"expected a weight for its factors, found {weight}_{next(iter(of_weight))} "
                f"without {weight}: the factors would be left out",
                where=folder,
                do=f"use the checkpoint in 16 bits, or {VLLM_ADVICE}",
            )
    if not is_dequantised_here(fields):
        return
    found: dict[str, str] = {}
    for name, (dtype, shape) in kinds.items():
        weight = name.removesuffix("_packed")
        module = name.rpartition(".")[0]
        if _FACTOR.fullmatch(name) or _DROPPED.fullmatch(name):
            continue
        if weight in factors and factors[weight].keys().isdisjoint(("scale", "scale_inv")):
            found[name] = f"{dtype} with {', '.join(factors[weight])} alone"
        elif weight in factors:
            scale = _scale(factors[weight])
            if not _fits((dtype, shape), scale, _block(fields)):
                found[name] = f"{dtype} {shape} with factors {scale[0]} {scale[1]}"
            if without_wrappers(module) in ("embed_tokens", "lm_head"):
                found[name] = "quantised, and heads are made of it"
        elif dtype in ("U8", "I8", "F8_E4M3", "F8_E5M2") or (
            f"{module}.weight" in factors and name != f"{module}.bias"
        ):
            found[name] = dtype
    if found:
        name, what = next(iter(found.items()))
        raise UserError(
            "expected NVFP4, MXFP4 or 8-bit weights with a factor for each block, row or tensor, "
            f"found {name}: {what}",
            where=folder,
            do=f"use the checkpoint in 16 bits, or {VLLM_ADVICE}",
        )


def read_weights(
    folder: Path, fields: Mapping[str, Any], dtype: torch.dtype, layers: int | None = None
) -> dict[str, Tensor]:
    """Read a checked checkpoint's tensors under the names that they had before they were quantised,
    of the first `layers` (None: all). Weights are in `dtype`, rounded once from float32; what was
    not quantised is as it is.
    """
    tensors: dict[str, Tensor] = {}
    for file in shard_files(folder):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                number = _LAYER.search(name)
                if layers is None or number is None or int(number[1]) < layers:
                    tensors[name] = opened.get_tensor(name)
    factors, plain, block = _factors(tensors), {}, _block(fields)
    for name in list(tensors):
        weight = name.removesuffix("_packed")
        if of_weight := factors.get(weight):
            factor, divisor = (of_weight.get(kind) for kind in ("scale_2", "global_scale"))
            values = tensors.pop(name)
            plain[weight] = dequantise(values, _scale(of_weight), factor, divisor, block).to(dtype)
        elif not _FACTOR.fullmatch(name) and not _DROPPED.fullmatch(name):
            plain[name] = tensors[name]
    return plain


def dequantise(
    values: Tensor,
    scale: Tensor,
    factor: Tensor | None = None,
    divisor: Tensor | None = None,
    block: tuple[int, int] | None = None,
) -> Tensor:
    """Return plain weights in float32.

    Args:
        values: uint8 [R, C / 2], or float8 or int8 [..., R, C].
        scale: factors of blocks, float8 or, of MXFP4, uint8 [R, C / block]; of 8-bit values [],
            [1], [R, 1], or [..., R / rows, C / columns], rounded up.
        factor, divisor: of the whole tensor. block: rows and columns of a block of 8-bit values.
    """
    scale = torch.exp2(scale.float() - 127) if scale.dtype == torch.uint8 else scale.float()
    if factor is not None:
        scale = scale * factor.float()
    if divisor is not None:
        scale = scale / divisor.float()
    if values.dtype == torch.uint8:
        pairs = _BYTES[values.int()].flatten(-2)  # [R, C]
        return (pairs.unflatten(-1, (scale.shape[-1], -1)) * scale[..., None]).flatten(-2)
    size = _shared_size([*values.shape], [*scale.shape], block)
    return values.float() * (scale if size is None else _spread(scale, values.shape, size))


def quantise(
    weights: Tensor, scale: Tensor, block: tuple[int, int] | None = None
) -> tuple[Tensor, Tensor]:
    """Return codes of weights in float8 (E4M3), and their factors in the dtype of `scale`.

    A block keeps its factor, doubled until its values fit. So what `dequantise` returned becomes
    the same bits again, even rounded to bfloat16, since codes differ by 1/16 or more. Factors that
    are powers of two stay so.

    Args:
        weights: [..., R, C]. scale, block: of earlier ones, as `dequantise` takes them.
    """
    size = _shared_size([*weights.shape], [*scale.shape], block)
    assert size is not None  # the caller has checked the shapes
    largest = F.max_pool2d(weights.float().abs()[None], size, ceil_mode=True)
    largest = largest.view(scale.shape) if scale.ndim > 1 else largest.max()
    factors = scale.float().double()  # quotients by the smallest ones overflow float32
    growth = (largest / (_LARGEST_ROUNDED * factors)).log2().ceil().clamp(min=0)
    grown = (factors * torch.exp2(growth)).to(scale.dtype)
    ratio = weights.float() / _spread(grown.float(), weights.shape, size)
    return ratio.clamp(-LARGEST_E4M3, LARGEST_E4M3).to(E4M3), grown


class StoredWeights:
    """Weights of a checkpoint by their names, whether they are stored as they are or in float8."""

    def __init__(self, folder: Path, *, meta: bool = False) -> None:
        """Open a folder; with `meta` only headers are read, and tensors are on the meta device."""
        self.folder, self.files = folder, tensor_files(folder)
        self._read = partial(meta_tensor if meta else read_tensor, folder, files=self.files)
        fields = read_fields(folder / "config.json", {}, kind="target's config.json")
        parts = (part for part in (fields, fields.get("text_config")) if isinstance(part, dict))
        found = (part.get("quantization_config") for part in parts)
        self._block = next((_block(one) for one in found if isinstance(one, dict)), None)

    def factors_of(self, name: str) -> str | None:
        """Return the name of a weight's factors; None: it is not in 8 bits."""
        names = (f"{name}_scale_inv", f"{name}_scale")
        return next((one for one in names if one in self.files), None)

    def read(self, name: str) -> Tensor:
        """Return a tensor, dequantised to float32 if it is in float8; raise a `UserError` if it is
        missing, not finite, or without the factors that it needs.
        """
        values = self._read(name)
        if values.dtype != E4M3 and self.factors_of(name) is None:
            return values
        if values.dtype != E4M3:
            raise self._fault(name, "float8 (E4M3) beside factors", f"{values.dtype}")
        plain = dequantise(values, self._factors(name, values.shape), block=self._block)
        if not (plain.is_meta or plain.isfinite().all()):
            raise self._fault(name, "numbers", "NaN or infinity")
        return plain

    def quantised(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return weights as the checkpoint stores them: some in float8 beside their factors."""
        stored = dict(tensors)
        for name, tensor in tensors.items():
            if factors := self.factors_of(name):
                scale = self._factors(name, tensor.shape).to(tensor.device)
                stored[name], stored[factors] = quantise(tensor, scale, self._block)
        return stored

    def replaced(self, tensors: Mapping[str, Tensor]) -> StoredWeights:
        """Return the weights of the checkpoint after some of its tensors have been replaced."""
        new, read = copy.copy(self), self._read
        new._read = lambda name: tensors[name] if name in tensors else read(name)
        return new

    def _factors(self, name: str, shape: torch.Size) -> Tensor:
        """Return the factors of a weight; raise a `UserError` unless they are positive numbers that
        fit its shape."""
        if (factors := self.factors_of(name)) is None:
            raise self._fault(name, f"factors in {name}_scale_inv or _scale", "none")
        scale = self._read(factors)
        size = _shared_size([*shape], [*scale.shape], self._block)
        if size is None or not scale.is_floating_point():
            expected = f"floating factors for each {self._block or 'row'} of {[*shape]}"
            raise self._fault(name, expected, f"{[*scale.shape]} of {scale.dtype}")
        positive = (scale.float() > 0) & scale.float().isfinite()
        if not (scale.is_meta or positive.all()):
            raise self._fault(name, "positive factors", "others")
        return scale

    def _fault(self, name: str, expected: str, found: str) -> UserError:
        return UserError(
            f"{name}: expected {expected}, found {found}",
            where=self.folder,
            do="fetch the checkpoint again from a source that you trust, or use it in 16 bits",
        )


def _spread(scale: Tensor, shape: torch.Size, size: tuple[int, int]) -> Tensor:
    """Return factors that broadcast to weights of a shape."""
    for axis in (-2, -1) if scale.ndim > 1 else ():
        if scale.shape[axis] > 1:
            scale = scale.repeat_interleave(size[axis], axis).narrow(axis, 0, shape[axis])
    return scale


def _shared_size(
    shape: list[int], scale: list[int], block: tuple[int, int] | None
) -> tuple[int, int] | None:
    """Return the rows and columns of 8-bit weights that share a factor; None: shapes do not fit."""
    if len(shape) < 2 or not all(shape):
        return None
    rows, columns = shape[-2:]
    if scale in ([], [1]):
        return rows, columns
    for size in filter(None, ((1, columns), block)):
        if scale == [*shape[:-2], -(-rows // size[0]), -(-columns // size[1])]:
            return min(size[0], rows), min(size[1], columns)
    return None


def _has_only_scales(weights: Mapping[str, Any], layout: Any) -> bool:
    """Return whether weights of a layout of compressed-tensors have factors and nothing else."""
    if layout in _PACKED:
        return True
    strategy, is_symmetric = weights.get("strategy"), weights.get("symmetric", True)
    return layout in _PLAIN and strategy in ("tensor", "channel", "block") and is_symmetric


def _factors(tensors: Mapping[str, T]) -> dict[str, dict[str, T]]:
    """Return the factors of each weight, by their kind."""
    factors: dict[str, dict[str, T]] = {}
    for name, tensor in tensors.items():
        if found := _FACTOR.fullmatch(name):
            factors.setdefault(found[1], {})[found[2]] = tensor
    return factors


def _scale(factors: Mapping[str, T]) -> T:
    """Return a weight's factors of blocks, of rows, or of all its values."""
    return factors["scale"] if "scale" in factors else factors["scale_inv"]


def _block(fields: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the rows and columns of a block of 8-bit weights."""
    groups = [group.get("weights") or {} for group in _groups(fields)]
    for found in (fields.get("weight_block_size"), *(g.get("block_structure") for g in groups)):
        if found:
            sizes = [*found] if isinstance(found, list | tuple) else []
            if len(sizes) != 2 or not all(isinstance(n, int) and n > 0 for n in sizes):
                raise UserError(
                    f"expected the rows and columns of a block of weights, found {found}",
                    where="quantization_config",
                    do="fetch config.json again from a source that you trust",
                )
            return sizes[0], sizes[1]
    return None


def _groups(fields: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the groups of layers of a config of compressed-tensors."""
    groups = fields.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        if isinstance(group, Mapping):
            yield group


def _dtypes(folder: Path) -> dict[str, Kind]:
    """Return the dtype and shape of each tensor of a checkpoint."""
    kinds = {}
    for file in shard_files(folder):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                one = opened.get_slice(name)
                kinds[name] = one.get_dtype(), one.get_shape()
    return kinds


def _fits(values: Kind, factors: Kind, block: tuple[int, int] | None) -> bool:
    """Return whether `dequantise` takes values and factors of these dtypes and shapes."""
    (dtype, shape), (scale_dtype, scale_shape) = values, factors
    if dtype in ("F8_E4M3", "I8"):
        return _shared_size(shape, scale_shape, block) is not None
    size = {"F8_E4M3": 16, "U8": 32}.get(scale_dtype)
    return (
        dtype == "U8"
        and size is not None
        and len(shape) == 2
        and scale_shape == [shape[0], 2 * shape[1] // size]
        and 2 * shape[1] % size == 0
    )
