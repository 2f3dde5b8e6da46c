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
from draftlab.store.shard_files import ShardFiles

_BLOCK = 1 << 24
"""Bytes that are hashed and written at a time."""


def write_shard(tensors: dict[str, Tensor], path: Path) -> tuple[int, str]:
    """Write the bytes of `safetensors.torch.save_file` to a new file, and copy no tensor; return
    its size and its hex SHA-256, computed while it is written.
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
    """Return the header of a file of these tensors, and their names in the file's order.

    The format's library orders tensors by dtype and name, and names the dtypes.
    """
    example = save({name: torch.zeros(1, dtype=t.dtype) for name, t in tensors.items()})
    entries = json.loads(example[8 : 8 + int.from_bytes(example[:8], "little")])
    start = 0
    for name, entry in entries.items():
        end = start + tensors[name].nbytes
        entry |= {"shape": list(tensors[name].shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, list(entries)


def map_shard(
    files: ShardFiles, shard: Shard, identity: StoreIdentity, do: str
) -> dict[str, Tensor]:
    """Return the mapped tensors of a shard that holds the manifest's records.

    Shapes, dtypes and offsets are compared, and token ids and answer spans are read: an id outside
    the vocabulary would read beyond a table's end on a GPU.

    Args:
        do: what a user does about a damaged shard.

    Raises:
        UserError: the file is corrupt or of another store, or there is no memory to map it.
    """
    path = files.where(shard.file)
    try:
        with files.local_file(shard) as local:
            file = safe_open(local, "pt")
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
    planned = identity.tensors(shard.records, shard.tokens)
    expected = {name: shape for name, (_, shape) in planned.items()}
    offsets = [0, *itertools.accumulate(shard.lengths)]
    if shapes != expected or tensors["offsets"].tolist() != offsets:
        raise UserError(
            "the shard does not hold the manifest's records: it belongs to another store or is "
            f"corrupt (expected {expected}, found {shapes})",
            where=path,
            do=do,
        )
    if fault := _fault(tensors, identity):
        raise UserError(f"the shard is corrupt: {fault}", where=path, do=do)
    return tensors


def _fault(tensors: dict[str, Tensor], identity: StoreIdentity) -> str | None:
    """Return the first dtype or value that a shard of this format cannot have; None without any."""
    for name, (dtype, _) in identity.tensors(0, 0).items():
        if tensors[name].dtype != dtype:
            return f"{name}: expected {dtype}, found {tensors[name].dtype}"
    last_id = identity.vocab_size - 1
    # The argmax is -1 where no head learns from the distribution.
    bounds = {"tokens": (0, last_id), "argmax": (-1, last_id), "spans": (0, len(tensors["spans"]))}
    for name, (lowest, highest) in bounds.items():
        if not len(tensors[name]):
            continue
        smallest, largest = (int(value) for value in tensors[name].aminmax())
        if smallest < lowest or largest > highest:
            return f"{name}: expected {lowest} to {highest}, found {smallest} to {largest}"
    return None
