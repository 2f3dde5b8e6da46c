"""Comparison of an export with what it should contain; errors name the first difference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from draftlab.errors import UserError
from draftlab.export.weight_files import SAFETENSORS_METADATA, read_weights, weight_files


def compare_tensors(expected: dict[str, Tensor], folder: Path) -> None:
    """Compare names, dtypes, shapes and every byte of an export's safetensors.

    Args:
        expected: all tensors that the folder must hold.
        folder: the export.

    Raises:
        UserError: naming the first difference.
    """
    actual = read_weights(folder, "exported weights")
    files = weight_files(folder)
    where = files[0] if len(files) == 1 else folder
    if names := sorted(expected.keys() ^ actual.keys()):
        fault = "missing from" if names[0] in expected else "unknown in"
        raise UserError(
            f"tensor {names[0]} is {fault} the export",
            where=where,
            do="`draftlab export` writes the export again",
        )
    for name, tensor in expected.items():
        _compare(name, tensor, actual[name], where)
    for file in files:
        with safe_open(file, "pt") as opened:
            if opened.metadata() != SAFETENSORS_METADATA:
                raise UserError(
                    f"expected safetensors metadata {SAFETENSORS_METADATA}, found "
                    f"{opened.metadata()}",
                    where=file,
                    do="`draftlab export` writes the export again",
                )


def _compare(name: str, expected: Tensor, actual: Tensor, where: Path) -> None:
    for attribute in ("dtype", "shape"):
        if (a := getattr(expected, attribute)) != (b := getattr(actual, attribute)):
            raise UserError(
                f"{name}: expected {attribute} {a}, found {b}",
                where=where,
                do="`draftlab export` writes the export again",
            )
    # Bytes, since 0 == -0 and NaN != NaN.
    left, right = (t.contiguous().flatten().view(torch.uint8) for t in (expected, actual))
    if not torch.equal(left, right):
        index = int((left != right).nonzero()[0]) // expected.element_size()
        raise UserError(
            f"{name}: expected {expected.flatten()[index].item()} at flat index {index}, "
            f"found {actual.flatten()[index].item()}",
            where=where,
            do="export again; if the error stays, the head or the disk changes in between",
        )


def first_difference(expected: Any, actual: Any, path: str = "") -> str | None:
    """Return the first difference of two JSON values and their types; None if they are equal.

    It reads "path: expected …, found …".
    """
    if isinstance(expected, dict) and isinstance(actual, dict):
        for key in [*expected, *(k for k in actual if k not in expected)]:
            key_path = f"{path}.{key}".lstrip(".")
            if key not in actual:
                return f"{key_path}: expected {json.dumps(expected[key])}, found nothing"
            if key not in expected:
                return f"{key_path}: expected no such key, found {json.dumps(actual[key])}"
            if inner := first_difference(expected[key], actual[key], key_path):
                return inner
        return None
    if json.dumps(expected) == json.dumps(actual):  # unlike ==, 1, true and 1.0 differ
        return None
    return f"{path}: expected {json.dumps(expected)}, found {json.dumps(actual)}"
