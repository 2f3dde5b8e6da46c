"""Reading an export back: the first difference between what was meant and what is on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from draftlab.base import UserError

SAFETENSORS_METADATA = {"format": "pt"}
"""What transformers' readers ask of a safetensors header."""


def read_tensors(file: Path, kind: str) -> dict[str, Tensor]:
    """All tensors of a safetensors file; a missing or broken one is a `UserError` naming it."""
    try:
        return load_file(file)
    except Exception as error:  # safetensors raises its own types
        raise UserError(f"the {kind} cannot be read: {error}", where=file) from None


def compare_tensors(wanted: dict[str, Tensor], file: Path) -> None:
    """Compares names, dtypes, shapes and every byte of a safetensors file.

    Args:
        wanted: the tensors that the file must hold, and no others.
        file: the safetensors file.

    Raises:
        UserError: naming the first difference.
    """
    found = read_tensors(file, "exported weights")
    if odd := sorted(wanted.keys() ^ found.keys()):
        side = "missing from" if odd[0] in wanted else "unknown in"
        raise UserError(f"tensor {odd[0]} is {side} the export", where=file)
    for name, tensor in wanted.items():
        _compare(name, tensor, found[name], file)
    with safe_open(file, "pt") as opened:
        if opened.metadata() != SAFETENSORS_METADATA:
            raise UserError(
                f"expected safetensors metadata {SAFETENSORS_METADATA}, found {opened.metadata()}",
                where=file,
            )


def _compare(name: str, wanted: Tensor, found: Tensor, file: Path) -> None:
    for what in ("dtype", "shape"):
        if (a := getattr(wanted, what)) != (b := getattr(found, what)):
            raise UserError(f"{name}: expected {what} {a}, found {b}", where=file)
    # Bytes, since 0 == -0 and NaN != NaN.
    left, right = (t.contiguous().flatten().view(torch.uint8) for t in (wanted, found))
    if not torch.equal(left, right):
        index = int((left != right).nonzero()[0]) // wanted.element_size()
        raise UserError(
            f"{name}: expected {wanted.flatten()[index].item()} at flat index {index}, "
            f"found {found.flatten()[index].item()}",
            where=file,
            do="export again; if it stays, the head or the disk changed in between",
        )


def first_difference(wanted: Any, found: Any, path: str = "") -> str | None:
    """The first difference of two JSON values, "path: expected …, found …"; types count."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        for key in [*wanted, *(k for k in found if k not in wanted)]:
            here = f"{path}.{key}".lstrip(".")
            if key not in found:
                return f"{here}: expected {json.dumps(wanted[key])}, found nothing"
            if key not in wanted:
                return f"{here}: expected no such key, found {json.dumps(found[key])}"
            if inner := first_difference(wanted[key], found[key], here):
                return inner
        return None
    if json.dumps(wanted) == json.dumps(found):  # unlike ==, tells 1 from true and from 1.0
        return None
    return f"{path}: expected {json.dumps(wanted)}, found {json.dumps(found)}"
