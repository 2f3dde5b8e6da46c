"""safetensors checkpoints of one file, or of several with an index: dtypes, comparison."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from draftlab.errors import UserError
from draftlab.files import atomic_path, write_json
from draftlab.target_model.parts import tensor_files
from draftlab.tensor_files import reading_tensors, save_tensors

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DELTA = "trained.safetensors"
"""The file of an export that has only the changed tensors of its target's checkpoint. It sorts
behind a checkpoint's files, which servers read in this order, so that its tensors are read last."""
ONLY_SHARD = "model-00001-of-00001.safetensors"
"""The name of a checkpoint's `WEIGHTS` beside a `DELTA`: transformers would read a file that is
called `WEIGHTS`, and not the index."""
MAX_SHARD = "5GB"
"""Largest safetensors file, as transformers writes them."""
SAFETENSORS_METADATA = {"format": "pt"}
"""The metadata that transformers requires in a safetensors header."""
WRITE_AGAIN = "`draftlab export` writes the export again"


def write_weights(tensors: dict[str, Tensor], folder: Path) -> None:
    """Write model.safetensors, or above `MAX_SHARD` several files and an index.

    Raises:
        UserError: the disk is full.
    """
    split = split_torch_state_dict_into_shards(tensors, max_shard_size=MAX_SHARD)
    for name, members in split.filename_to_tensors.items():
        with atomic_path(folder / name) as file:
            save_tensors({n: tensors[n] for n in members}, file, metadata=SAFETENSORS_METADATA)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json(folder / INDEX, index)


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint: those in its index, or the only one. Of an
    export of changed tensors this is `DELTA`.

    Raises:
        UserError: an index with paths outside the folder, no safetensors, or several without index.
    """
    if (folder / DELTA).is_file():
        return [folder / DELTA]
    if (folder / INDEX).is_file():
        return [folder / name for name in sorted({*tensor_files(folder).values()})]
    files = sorted(folder.glob("*.safetensors"))
    if (folder / WEIGHTS) in files:
        return [folder / WEIGHTS]
    if len(files) == 1:
        return files
    if files:
        raise UserError(
            f"expected {WEIGHTS}, or {INDEX}, found {', '.join(f.name for f in files[:5])}",
            where=folder,
            do="keep the files of one head in the folder, or add their index",
        )
    pickled = sorted(f.name for kind in ("*.bin", "*.pt", "*.pth") for f in folder.glob(kind))
    if pickled:
        raise UserError(
            f"expected safetensors, found {', '.join(pickled[:3])}: pickled files can run code "
            "when they are read, so draftlab reads none",
            where=folder,
            do="if you trust its origin: python -c 'import torch; from safetensors.torch import "
            f'save_file; t = torch.load("{pickled[0]}", weights_only=True); '
            'save_file({k: v.contiguous() for k, v in t.items()}, "model.safetensors", '
            'metadata={"format": "pt"})\'',
        )
    raise UserError(
        "expected safetensors, found none", where=folder, do="give a folder with model.safetensors"
    )


def write_delta(tensors: dict[str, Tensor], folder: Path) -> None:
    """Write `DELTA`, a checkpoint's changed tensors; raise a `UserError` if the disk is full."""
    with atomic_path(folder / DELTA) as file:
        save_tensors(tensors, file, metadata=SAFETENSORS_METADATA)


def delta_index(folder: Path, changed: Iterable[str]) -> dict[str, Any]:
    """Return the index of a whole checkpoint in which the `changed` tensors are in `DELTA`, and
    `WEIGHTS` is called `ONLY_SHARD`.

    Args:
        folder: the checkpoint, whose other tensors stay in its files.

    Raises:
        UserError: the checkpoint cannot be read, or has a file that sorts behind `DELTA`.
    """
    files = tensor_files(folder)
    if late := sorted(file for file in {*files.values()} if file > DELTA):
        raise UserError(
            f"expected files that sort before {DELTA}, found {late[0]}: vLLM reads a checkpoint's "
            "files in this order, and would take the old values from the last one",
            where=folder,
            do=f"rename {late[0]}, in the checkpoint's index too",
        )
    files = {name: ONLY_SHARD if file == WEIGHTS else file for name, file in files.items()}
    files |= dict.fromkeys(changed, DELTA)
    return {"metadata": {}, "weight_map": dict(sorted(files.items()))}


def read_weights(folder: Path, kind: str) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint.

    Args:
        kind: name of the tensors in errors.

    Raises:
        UserError: as `weight_files`; a file that cannot be read; a tensor in two files.
    """
    tensors: dict[str, Tensor] = {}
    for file in weight_files(folder):
        with reading_tensors(file, kind):
            found = load_file(file)
        if twice := sorted(tensors.keys() & found.keys()):
            raise UserError(
                f"the {kind} hold {twice[0]} twice", where=file, do="remove one of the two files"
            )
        tensors |= found
    return tensors


FLOATING_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that heads can have."""


def floating_dtype(name: torch.dtype | str) -> torch.dtype:
    """Return one of `FLOATING_DTYPES` by its name; raise a `UserError` for another dtype."""
    dtype = name if isinstance(name, torch.dtype) else getattr(torch, str(name), None)
    if dtype not in FLOATING_DTYPES:
        raise UserError(
            f"expected the dtype float32, bfloat16 or float16, found {name!r}",
            do="name one of these three dtypes",
        )
    return dtype


def common_dtype(tensors: dict[str, Tensor], where: Path) -> torch.dtype:
    """Return the floating dtype of a head's weights.

    Raises:
        UserError: they have several, or one that heads cannot have.
    """
    dtypes = {t.dtype for t in tensors.values() if t.is_floating_point()}
    if len(dtypes) == 1 and dtypes < {*FLOATING_DTYPES}:
        return dtypes.pop()
    raise UserError(
        "expected the head's weights in one dtype out of float32, bfloat16 and float16, found "
        f"{', '.join(sorted(str(dtype).removeprefix('torch.') for dtype in dtypes))}",
        where=where,
        do="choose one with --dtype (float32 holds all values)",
    )


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
        raise UserError(f"tensor {names[0]} is {fault} the export", where=where, do=WRITE_AGAIN)
    for name, tensor in expected.items():
        _compare(name, tensor, actual[name], where)
    for file in files:
        with safe_open(file, "pt") as opened:
            if (found := opened.metadata()) != SAFETENSORS_METADATA:
                what = f"expected safetensors metadata {SAFETENSORS_METADATA}, found {found}"
                raise UserError(what, where=file, do=WRITE_AGAIN)


def _compare(name: str, expected: Tensor, actual: Tensor, where: Path) -> None:
    for attribute in ("dtype", "shape"):
        if (a := getattr(expected, attribute)) != (b := getattr(actual, attribute)):
            what = f"{name}: expected {attribute} {a}, found {b}"
            raise UserError(what, where=where, do=WRITE_AGAIN)
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
