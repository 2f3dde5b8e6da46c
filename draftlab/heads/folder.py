"""A head on disk: draftlab.json (source of truth), model.safetensors, and a generated config.json.

config.json is the vLLM-native description generated from draftlab.json, so that vLLM loads the
folder as it stands; embeddings equal to the target's are left out there and here (vLLM shares the
target's, and so do we).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
from draftlab.heads.config import HeadConfig
from draftlab.heads.eagle import LM_HEAD, TARGET_NORM, EagleHead
from draftlab.heads.eagle3 import Eagle3Head
from draftlab.heads.head import EMBEDDINGS, DraftHead
from draftlab.heads.llama4 import EagleLlama4Head
from draftlab.heads.native import native_config
from draftlab.heads.peagle import PeagleHead
from draftlab.settings import complaints

CONFIG, WEIGHTS, NATIVE = "draftlab.json", "model.safetensors", "config.json"
_BORROWED = {EMBEDDINGS: "embeddings", LM_HEAD: "lm_head", TARGET_NORM: "final norm"}
"""What a head may use of its target."""

_FAMILIES: dict[str, Callable[[HeadConfig], DraftHead]] = {
    "eagle3": Eagle3Head,
    "ptd": PeagleHead,
    "eagle": EagleHead,
    "eagle_llama4": EagleLlama4Head,
}


def new_head(config: HeadConfig) -> DraftHead:
    """A head of the family that `config` names, its values yet to be set."""
    return _FAMILIES[config.family](config)


def head_tensors(head: DraftHead, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every tensor by its name in files, floating ones cast to `dtype`, on the CPU."""
    return {
        name: (t.to(dtype) if t.is_floating_point() else t).detach().cpu().contiguous()
        for name, t in head.tensors().items()
    }


def save_head(folder: Path, head: DraftHead, dtype: torch.dtype) -> None:
    """Writes the head folder; draftlab.json comes last, so a folder that has it is whole."""
    # An older head here is no head any more from the first changed file on.
    (folder / CONFIG).unlink(missing_ok=True)
    tensors = head_tensors(head, dtype)
    for name in head.borrowed():
        del tensors[name]
    if head.config.draft_vocab_size == head.config.vocab_size:
        # A reader without a draft vocabulary has no place for the two maps (servers §1.3).
        del tensors["d2t"], tensors["t2d"]
    with atomic_path(folder / WEIGHTS) as temporary:
        save_tensors(tensors, temporary, metadata={"format": "pt"})
    name = str(dtype).removeprefix("torch.")
    write_json(folder / NATIVE, native_config(head.config, name))
    write_json(folder / CONFIG, head.config.model_dump(mode="json", by_alias=True))


def load_config(folder: Path) -> HeadConfig:
    """Reads draftlab.json strictly."""
    if (folder / NATIVE).is_file() and not (folder / CONFIG).is_file():
        raise UserError(
            "expected a head's folder with draftlab.json, found a head in another program's layout",
            where=folder,
            do=f"`draftlab import {quote(str(folder))} --to FOLDER` makes a head folder of it",
        )
    fields = read_json(folder / CONFIG, kind="head's draftlab.json")
    try:
        return HeadConfig.model_validate(fields)
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
    """Shapes of the tensors in a head's file, by name; only its header is read.

    Raises:
        UserError: when the file is missing, or cut.
    """
    with _reading(folder / WEIGHTS), safe_open(folder / WEIGHTS, "pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def load_head(
    folder: Path,
    *,
    embeddings: Tensor | None = None,
    lent: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype,
    device: torch.device | str,
) -> DraftHead:
    """Loads a head for inference, of the family that draftlab.json names.

    Args:
        folder: the head folder.
        embeddings: the target's embeddings [V, H], used when the head ships none of its own.
        lent: all that a head may use of its target, by its name there (`TargetParts.lent`). What
            has this dtype and device already is shared, not copied.
        dtype: of floating tensors.
        device: where it runs.

    Raises:
        UserError: for missing, unknown or misshapen tensors, each named, or NaN.
    """
    config = load_config(folder)
    with _reading(folder / WEIGHTS):
        tensors = load_file(folder / WEIGHTS)
    head = new_head(config)
    given = dict(lent or {}) | ({} if embeddings is None else {EMBEDDINGS: embeddings})
    borrowed = {name: _borrow(name, tensors, given, folder) for name in sorted(head.borrowed())}
    tensors |= borrowed
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
    for name, tensor in borrowed.items():
        own = head.get_parameter(name)
        if (own.dtype, own.device) == (tensor.dtype, tensor.device):
            own.data = tensor.detach()
    return head


def _borrow(
    name: str, stored: Mapping[str, Tensor], given: Mapping[str, Tensor], folder: Path
) -> Tensor:
    """A tensor that is the target's, which the head's file must not hold."""
    if name in stored:
        own = 'say "embeddings": "own" if these are the ones the head was trained with'
        raise UserError(
            f"draftlab.json says that the target lends {name}, and the file holds one",
            where=folder / WEIGHTS,
            do=own if name == EMBEDDINGS else "remove the tensor: it would not be used",
        )
    if name not in given:
        raise UserError(
            f"the head uses its target's {_BORROWED[name]}, and none were given", where=folder
        )
    return given[name]


def check_tensors(head: DraftHead, tensors: dict[str, Tensor], where: Path) -> None:
    """Raises a `UserError` that lists every missing, unknown, misshapen or non-finite tensor."""
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
    """Where the expected width comes from, of a tensor that reads features."""
    if name not in ("fc.weight", "mask_hidden"):
        return ""
    count, size = len(config.boundaries), config.target_hidden_size
    return f" ({count} boundaries of {size} are {config.feature_size} wide)"
