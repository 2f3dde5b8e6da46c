"""Reading an export back: the first difference between what was meant and what is on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from draftlab.errors import UserError
from draftlab.export.weight_files import SAFETENSORS_METADATA, read_weights, weight_files


def compare_tensors(wanted: dict[str, Tensor], folder: Path) -> None:
    """Compares names, dtypes, shapes and every byte of an export's safetensors.

    Args:
        wanted: the tensors that the folder must hold, and no others.
        folder: the export.

    Raises:
        UserError: naming the first difference.
    """
    found = read_weights(folder, "exported weights")
    files = weight_files(folder)
    where = files[0] if len(files) == 1 else folder
    if odd := sorted(wanted.keys() ^ found.keys()):
        side = "missing from" if odd[0] in wanted else "unknown in"
        raise UserError(f"tensor {odd[0]} is {side} the export", where=where)
    for name, tensor in wanted.items():
        _compare(name, tensor, found[name], where)
    for file in files:
        with safe_open(file, "pt") as opened:
            if opened.metadata() != SAFETENSORS_METADATA:
                raise UserError(
                    f"expected safetensors metadata {SAFETENSORS_METADATA}, found "
                    f"{opened.metadata()}",
                    where=file,
                )


def _compare(name: str, wanted: Tensor, found: Tensor, where: Path) -> None:
    for what in ("dtype", "shape"):
        if (a := getattr(wanted, what)) != (b := getattr(found, what)):
            raise UserError(f"{name}: expected {what} {a}, found {b}", where=where)
    # Bytes, since 0 == -0 and NaN != NaN.
    left, right = (t.contiguous().flatten().view(torch.uint8) for t in (wanted, found))
    if not torch.equal(left, right):
        index = int((left != right).nonzero()[0]) // wanted.element_size()
        raise UserError(
            f"{name}: expected {wanted.flatten()[index].item()} at flat index {index}, "
            f"found {found.flatten()[index].item()}",
            where=where,
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
