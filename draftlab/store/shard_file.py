"""The safetensors file of a shard: written with its hash, and mapped into memory."""

from __future__ import annotations

import hashlib
import itertools
import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from draftlab.errors import UserError
from draftlab.store.manifest import Shard, StoreIdentity

_BLOCK = 1 << 24
"""Bytes that are hashed and written at a time."""


def write_shard(tensors: dict[str, Tensor], path: Path) -> tuple[int, str]:
    """Write the bytes of `safetensors.torch.save_file` to a new file; copy no tensor.

    Returns:
        The file's size and its hex SHA-256, computed while it is written.
    """
    header, names = _header(tensors)
    digest = hashlib.sha256(header)
    with open(path, "xb") as file:
        file.write(header)
        for name in names:
            data = memoryview(tensors[name].contiguous().flatten().view(torch.uint8).numpy())
            for start in range(0, len(data), _BLOCK):
                block = data[start : start + _BLOCK]
                digest.update(block)
                file.write(block)
        return file.tell(), digest.hexdigest()


def _header(tensors: dict[str, Tensor]) -> tuple[bytes, list[str]]:
    """Return the header of a file of these tensors, and their names in the file's order."""
    # safetensors orders tensors by their dtypes and names, and names the dtypes.
    one_value = save({name: torch.zeros(1, dtype=t.dtype) for name, t in tensors.items()})
    entries = json.loads(one_value[8 : 8 + int.from_bytes(one_value[:8], "little")])
    start = 0
    for name, entry in entries.items():
        end = start + tensors[name].nbytes
        entry |= {"shape": list(tensors[name].shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, list(entries)


def map_shard(folder: Path, shard: Shard, identity: StoreIdentity, do: str) -> dict[str, Tensor]:
    """Return the mapped tensors of a shard whose shapes and offsets are the manifest's.

    Args:
        do: what a user does about a damaged shard.

    Raises:
        UserError: the file is corrupt or of another store, or there is no memory to map it.
    """
    path = shard.path(folder)
    try:
        file = safe_open(path, "pt")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, MemoryError, RuntimeError) as error:
        if "Cannot allocate memory" in str(error):
            raise UserError(
                f"the system has no memory to map a shard: {error}",
                where=path,
                do="raise the limits of address space (ulimit -v) and of mapped files (sysctl "
                "vm.max_map_count), or run fewer processes; the store is whole",
            ) from None
        raise UserError(f"the shard is truncated or corrupt: {error}", where=path, do=do) from None
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    expected = identity.tensor_shapes(shard.records, shard.tokens)
    offsets = [0, *itertools.accumulate(shard.lengths)]
    if shapes != expected or tensors["offsets"].tolist() != offsets:
        raise UserError(
            "the shard does not hold the manifest's records: it belongs to another store or is "
            f"corrupt (expected {expected}, found {shapes})",
            where=path,
            do=do,
        )
    return tensors
