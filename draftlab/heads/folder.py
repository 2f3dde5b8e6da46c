"""The head folder: draftlab.json (source of truth), model.safetensors, a generated config.json.

config.json is generated from draftlab.json in vLLM's native layout, so that vLLM loads the folder
unchanged. Tensors that the head shares with its target are not stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.overrides import TorchFunctionMode

from draftlab.errors import UserError
from draftlab.files import atomic_path, read_fields, write_json
from draftlab.heads.config import HeadConfig, make_head_config
from draftlab.heads.family import get_family
from draftlab.heads.head import EMBEDDINGS, LM_HEAD, TARGET_NORM, DraftHead
from draftlab.heads.validate import D2T, T2D, refuse_faults, tensor_faults
from draftlab.heads.vllm_config import native_config
from draftlab.settings import describe_errors
from draftlab.tensor_files import host_copy, reading_tensors, save_tensors

CONFIG, WEIGHTS, NATIVE = "draftlab.json", "model.safetensors", "config.json"
_SHARED = {EMBEDDINGS: "embeddings", LM_HEAD: "lm_head", TARGET_NORM: "final norm"}
"""Tensors that a head may share with its target, as messages call them."""


def new_head(config: HeadConfig) -> DraftHead:
    """Return a head of the family that `config` names, with torch's own random values."""
    return get_family(config.family).new_head(config)


class _WithoutRandomValues(TorchFunctionMode):
    """Leaves out the random values that torch's modules draw as they are made."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        if getattr(func, "__name__", "") in ("normal_", "uniform_", "kaiming_uniform_"):
            return args[0] if args else named["tensor"]
        return func(*args, **named)


def empty_head(config: HeadConfig) -> DraftHead:
    """Return a head whose memory may hold anything: values that torch would draw for one of 128,256
    tokens take a core ten seconds.
    """
    with _WithoutRandomValues():
        return new_head(config)


def meta_head(config: HeadConfig) -> DraftHead:
    """Return a head on the meta device: a config may name sizes that no machine can hold."""
    with torch.device("meta"):
        return new_head(config)


def save_head(folder: Path, head: DraftHead, dtype: torch.dtype) -> None:
    """Write the head folder; draftlab.json comes last, so a folder that has it is complete."""
    # Without draftlab.json an older head in this folder cannot be mistaken for a complete one.
    (folder / CONFIG).unlink(missing_ok=True)
    left_out = set(head.shared_tensors())
    if head.config.draft_vocab_size == head.config.vocab_size:
        left_out |= {D2T, T2D}  # readers without a draft vocabulary refuse them (servers §1.3)
    tensors = {}
    for name, tensor in head.tensors().items():
        if name not in left_out:
            cast = (tensor.to(dtype) if tensor.is_floating_point() else tensor).detach()
            tensors[name] = host_copy(cast) if cast.is_cuda else cast
    with atomic_path(folder / WEIGHTS) as temporary:
        save_tensors(tensors, temporary, metadata={"format": "pt"})
    native = native_config(head.config, str(dtype).removeprefix("torch."))
    if native:
        write_json(folder / NATIVE, native)
    else:
        (folder / NATIVE).unlink(missing_ok=True)
    write_json(folder / CONFIG, head.config.model_dump(mode="json", by_alias=True))


def load_config(folder: Path) -> HeadConfig:
    """Read draftlab.json; raise a `UserError` unless it describes a head of a known family."""
    if (folder / NATIVE).is_file() and not (folder / CONFIG).is_file():
        raise UserError(
            "expected a head folder with draftlab.json, found a model in another program's layout",
            where=folder,
            do=f"if it is a head, `draftlab import {quote(str(folder))} --to FOLDER` makes a head "
            "folder of it",
        )
    do = "restore draftlab.json from the run or the repository that the head came from"
    fields = read_fields(folder / CONFIG, {}, kind="head's draftlab.json", do=do)
    try:
        return make_head_config(**fields)
    except UserError as error:  # the family is unknown
        raise UserError(error.what, where=folder / CONFIG, do=error.do) from None
    except ValidationError as error:
        raise UserError(
            f"draftlab.json does not describe a head:\n  {describe_errors(error)}",
            where=folder / CONFIG,
            do=do,
        ) from None


def _reading(folder: Path) -> AbstractContextManager[None]:
    do = "copy the file again from where the head came from"
    if (folder.parent / "train").is_dir():
        do = "`draftlab train` makes this file again from the last checkpoint, once it is removed"
    return reading_tensors(folder / WEIGHTS, "head's weights", do)


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in a head's file, by name; only its header is read."""
    with _reading(folder), safe_open(folder / WEIGHTS, "pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def load_head(
    folder: Path,
    *,
    target_tensors: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype,
    device: torch.device | str,
) -> DraftHead:
    """Load a head for inference, of the family that draftlab.json names.

    Args:
        target_tensors: the tensors that a head may share with its target, by their names in the
            head (`TargetParts.shared_tensors`). A tensor of this dtype and device is not copied.

    Raises:
        UserError: tensors are missing, unknown, misshapen or not finite; each is named.
    """
    config = load_config(folder)
    with _reading(folder):
        tensors = load_file(folder / WEIGHTS)
    shapes = meta_head(config)
    refuse_faults(tensor_faults(shapes, tensors), folder / WEIGHTS)
    available, shared = target_tensors or {}, {}
    for name in sorted(shapes.shared_tensors()):
        if name not in available:
            raise UserError(
                f"the head needs its target's {_SHARED[name]}, and none were given",
                where=folder,
                do="name the target that the head was trained for: --target",
            )
        shared[name] = available[name]
        expected = shapes.tensors()[name].shape
        if shared[name].shape != expected:
            raise UserError(
                f"expected the target's {_SHARED[name]} in shape {list(expected)}, found "
                f"{list(shared[name].shape)}",
                where=folder,
                do="give the target that the head was trained for",
            )
    head, like = empty_head(config), torch.empty(0, dtype=dtype, device=device)
    for name, tensor in shared.items():
        if (tensor.dtype, tensor.device) == (like.dtype, like.device):
            head.get_parameter(name).data = tensor.detach()
    tensors |= shared  # torch copies no tensor onto itself
    if config.draft_vocab_size == config.vocab_size:
        head.set_draft_vocabulary(torch.arange(config.vocab_size))
        tensors |= {D2T: head.d2t, T2D: head.t2d}
    head.load_tensors(tensors)
    return head.to(device=device, dtype=dtype).eval().requires_grad_(False)
