"""safetensors with or without an index: written in pieces, read from inside one folder only."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import load_file
from torch import Tensor

from draftlab.errors import UserError
from draftlab.files import atomic_path, read_json, save_tensors, write_json

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SAFETENSORS_METADATA = {"format": "pt"}
"""What transformers' readers ask of a safetensors header."""


def write_weights(tensors: dict[str, Tensor], folder: Path, max_shard: str) -> None:
    """Writes model.safetensors, or above `max_shard` (such as "5GB") numbered pieces and an index.

    Raises:
        UserError: a size that is none, or a full disk.
    """
    try:
        split = split_torch_state_dict_into_shards(tensors, max_shard_size=max_shard)
    except ValueError as error:
        raise UserError(
            f"expected the largest size of a file such as 5GB or 500MB, found {max_shard!r}",
            where="export.max_shard",
        ) from error
    for name, members in split.filename_to_tensors.items():
        with atomic_path(folder / name) as file:
            save_tensors({n: tensors[n] for n in members}, file, metadata=SAFETENSORS_METADATA)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json(folder / INDEX, index)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint: those its index names, or the only one.

    Raises:
        UserError: an index that leads out of the folder, no safetensors, or several without index.
    """
    if (folder / INDEX).is_file():
        return _indexed(folder)
    found = sorted(folder.glob("*.safetensors"))
    if (folder / WEIGHTS) in found:
        return [folder / WEIGHTS]
    if len(found) == 1:
        return found
    if found:
        raise UserError(
            f"expected {WEIGHTS}, or {INDEX}, found {', '.join(f.name for f in found[:5])}",
            where=folder,
        )
    pickled = sorted(f.name for kind in ("*.bin", "*.pt", "*.pth") for f in folder.glob(kind))
    if pickled:
        raise UserError(
            f"expected safetensors, found {', '.join(pickled[:3])}: pickled files can run code "
            "when they are read, so draftlab reads none",
            where=folder,
            do="where you trust its origin: python -c 'import torch; from safetensors.torch import "
            f'save_file; t = torch.load("{pickled[0]}", weights_only=True); '
            'save_file({k: v.contiguous() for k, v in t.items()}, "model.safetensors", '
            'metadata={"format": "pt"})\'',
        )
    raise UserError("expected safetensors, found none", where=folder)


def _indexed(folder: Path) -> list[Path]:
    where = folder / INDEX
    index = read_json(where, kind="safetensors index")
    names = index.get("weight_map") if isinstance(index, dict) else None
    if not (isinstance(names, dict) and names and all(isinstance(n, str) for n in names.values())):
        raise UserError('expected an index with a "weight_map" of file names', where=where)
    for name in sorted(set(names.values())):
        # Whatever the index says, nothing outside the folder is opened.
        if name != Path(name).name or not name.endswith(".safetensors"):
            raise UserError(
                f"expected names of safetensors files beside the index, found {name!r}", where=where
            )
        if not (folder / name).is_file():
            raise UserError(f"the index names {name}, which is not there", where=where)
    return [folder / name for name in sorted(set(names.values()))]


def read_file(file: Path, kind: str) -> dict[str, Tensor]:
    """All tensors of a safetensors file; a missing or broken one is a `UserError` naming it."""
    try:
        return load_file(file)
    except Exception as error:  # safetensors raises its own types
        raise UserError(f"the {kind} cannot be read: {error}", where=file) from None


def read_weights(folder: Path, kind: str) -> dict[str, Tensor]:
    """All tensors of a checkpoint.

    Args:
        kind: what they are, for errors.

    Raises:
        UserError: as `weight_files`; a file that cannot be read; a tensor that two files hold.
    """
    tensors: dict[str, Tensor] = {}
    for file in weight_files(folder):
        for name, tensor in read_file(file, kind).items():
            if name in tensors:
                raise UserError(f"the {kind} hold {name} twice", where=file)
            tensors[name] = tensor
    return tensors
