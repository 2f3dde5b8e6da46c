"""The head folder: draftlab.json (source of truth), model.safetensors, a generated config.json.

config.json is vLLM's native description, generated from draftlab.json, so that vLLM loads the
folder as it stands. Tensors that the head shares with its target are in no file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from shlex import quote

import torch
from pydantic import ValidationError
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from draftlab.errors import UserError
from draftlab.files import atomic_path, read_json, save_tensors, write_json
from draftlab.heads.config import HeadConfig, read_head_config
from draftlab.heads.family import get_family
from draftlab.heads.head import EMBEDDINGS, LM_HEAD, TARGET_NORM, DraftHead
from draftlab.heads.native_config import native_config
from draftlab.settings import complaints

CONFIG, WEIGHTS, NATIVE = "draftlab.json", "model.safetensors", "config.json"
_SHARED = {EMBEDDINGS: "embeddings", LM_HEAD: "lm_head", TARGET_NORM: "final norm"}
"""What a head may share with its target."""


def new_head(config: HeadConfig) -> DraftHead:
    """Return a head of the family that `config` names; its values are yet to be set."""
    return get_family(config.family).new_head(config)


def head_tensors(head: DraftHead, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return every tensor by its name in files, on the CPU; floating ones are cast to `dtype`."""
    return {
        name: (t.to(dtype) if t.is_floating_point() else t).detach().cpu().contiguous()
        for name, t in head.tensors().items()
    }


def save_head(folder: Path, head: DraftHead, dtype: torch.dtype) -> None:
    """Write the head folder; draftlab.json comes last, so a folder that has it is complete."""
    # Once the first file has changed, an older head in this folder is no head any more.
    (folder / CONFIG).unlink(missing_ok=True)
    tensors = head_tensors(head, dtype)
    for name in head.shared_tensors():
        del tensors[name]
    if head.config.draft_vocab_size == head.config.vocab_size:
        # A reader without a draft vocabulary has no place for d2t and t2d (servers §1.3).
        del tensors["d2t"], tensors["t2d"]
    with atomic_path(folder / WEIGHTS) as temporary:
        save_tensors(tensors, temporary, metadata={"format": "pt"})
    native = native_config(head.config, str(dtype).removeprefix("torch."))
    if native:
        write_json(folder / NATIVE, native)
    else:
        (folder / NATIVE).unlink(missing_ok=True)
    write_json(folder / CONFIG, head.config.model_dump(mode="json", by_alias=True))


def load_config(folder: Path) -> HeadConfig:
    """Read draftlab.json strictly.

    Raises:
        UserError: the file is missing, or does not describe a head of a known family.
    """
    if (folder / NATIVE).is_file() and not (folder / CONFIG).is_file():
        raise UserError(
            "expected a head folder with draftlab.json, found a head in another program's layout",
            where=folder,
            do=f"`draftlab import {quote(str(folder))} --to FOLDER` makes a head folder of it",
        )
    fields = read_json(folder / CONFIG, kind="head's draftlab.json")
    if not isinstance(fields, dict):
        raise UserError("expected an object in draftlab.json, found none", where=folder / CONFIG)
    try:
        return read_head_config(fields)
    except UserError as error:  # the family is unknown
        raise UserError(error.what, where=folder / CONFIG, do=error.do) from None
    except ValidationError as error:
        raise UserError(
            f"draftlab.json does not describe a head:\n  {complaints(error)}",
            where=folder / CONFIG,
        ) from None


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise UserError("expected the head's weights, found nothing", where=path) from None
    except Exception as error:  # safetensors raises its own type for a truncated file
        raise UserError(
            f"the head's weights are unreadable: {error}",
            where=path,
            do="remove this file and train again: the last checkpoint gives the same bytes",
        ) from None


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in a head's file, by name; only its header is read.

    Raises:
        UserError: the file is missing or truncated.
    """
    with _reading(folder / WEIGHTS), safe_open(folder / WEIGHTS, "pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def load_head(
    folder: Path,
    *,
    embeddings: Tensor | None = None,
    target_tensors: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype,
    device: torch.device | str,
) -> DraftHead:
    """Load a head for inference, of the family that draftlab.json names.

    Args:
        folder: the head folder.
        embeddings: the target's embeddings [V, H], used when the head ships none of its own.
        target_tensors: all that a head may share with its target, by the head's name for it
            (`TargetParts.shared_tensors`). A tensor that has this dtype and device is not copied.
        dtype: of floating tensors.
        device: where it runs.

    Raises:
        UserError: tensors are missing, unknown, misshapen or not finite; each is named.
    """
    config = load_config(folder)
    with _reading(folder / WEIGHTS):
        tensors = load_file(folder / WEIGHTS)
    head = new_head(config)
    available = dict(target_tensors or {}) | (
        {} if embeddings is None else {EMBEDDINGS: embeddings}
    )
    shared = {n: _share(n, tensors, available, folder) for n in sorted(head.shared_tensors())}
    tensors |= shared
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
            do="`draftlab doctor HEAD --target TARGET` tells what it holds, absolute ids for one",
        )
    head = head.to(device=device, dtype=dtype).eval().requires_grad_(False)
    for name, tensor in shared.items():
        own = head.get_parameter(name)
        if (own.dtype, own.device) == (tensor.dtype, tensor.device):
            own.data = tensor.detach()
    return head


def _share(
    name: str, stored: Mapping[str, Tensor], available: Mapping[str, Tensor], folder: Path
) -> Tensor:
    """Return a tensor of the target, which the head's file must not hold."""
    if name in stored:
        own = 'say "embeddings": "own" if these are the ones the head was trained with'
        raise UserError(
            f"draftlab.json says that {name} is shared with the target, but the file holds one",
            where=folder / WEIGHTS,
            do=own if name == EMBEDDINGS else "remove the tensor: it would not be used",
        )
    if name not in available:
        raise UserError(
            f"the head needs its target's {_SHARED[name]}, and none were given", where=folder
        )
    return available[name]


def check_tensors(head: DraftHead, tensors: dict[str, Tensor], where: Path) -> None:
    """Raise a `UserError` that lists every missing, unknown, misshapen or non-finite tensor."""
    expected = head.tensors()
    faults = [
        f"missing {name}: expected shape {list(expected[name].shape)}"
        f"{_of_boundaries(head.config, name)}, found none"
        for name in expected.keys() - tensors.keys()
    ]
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
            "the head's tensors do not fit:\n  " + "\n  ".join(sorted(faults)),
            where=where,
            do="`draftlab doctor HEAD --target TARGET` tells what else its files contradict",
        )


def _of_boundaries(config: HeadConfig, name: str) -> str:
    """Return where the expected width comes from, if the tensor reads features."""
    if name not in ("fc.weight", "mask_hidden"):
        return ""
    count, size = len(config.boundaries), config.target_hidden_size
    return f" ({count} boundaries of {size} are {config.feature_size} wide)"
