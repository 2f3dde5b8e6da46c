"""Safetensors files, which are hashed while they are written; errors of reading them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from draftlab.errors import UserError
from draftlab.files import other_kind, remember_sha256

_BLOCK_BYTES = 1 << 26
"""Bytes that are written, and hashed meanwhile, at a time. Smaller blocks would wait more often for
Python's interpreter."""


@contextmanager
def reading_tensors(
    path: Path, kind: str, do: str = "copy or download the file again"
) -> Iterator[None]:
    """Raise a `UserError` if the block cannot read a safetensors file.

    Args:
        kind: what the file should hold, in the plural.
        do: what to do about a file that is missing or damaged. That of a clone without git-lfs has
            a pointer in its place, and advice of its own.
    """
    if found := other_kind(path):
        raise UserError(f"expected the {kind}, found {found}", where=path, do=do)
    try:
        yield
    except Exception as error:  # safetensors raises its own types
        found = f"the {kind} cannot be read: {error}"
        with open(path, "rb") as file:
            if file.read(32).startswith(b"version https://git-lfs"):
                found = f"expected the {kind}, found a git-lfs pointer to them"
                do = "run `git lfs pull` in the clone, or download the file"
        raise UserError(found, where=path, do=do) from None


def host_copy(values: Tensor) -> Tensor:
    """Return a copy of a tensor in the host's memory, to be written to a file.

    Its pages are taken by all threads first: the thread that copies would take them one by one, and
    copy 1 GB a second from a GPU in place of 6.
    """
    return torch.empty_like(values, device="cpu").fill_(0).copy_(values)


def save_tensors(
    tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None
) -> str:
    """Write a safetensors file as `write_tensors`, and let `known_sha256` know its hash; raise a
    `UserError` if it cannot be written.
    """
    try:
        digest = write_tensors(tensors, path, metadata)
    except OSError as error:
        raise UserError(
            f"the tensors could not be written: {error}",
            where=path,
            do="free disk space or write elsewhere; the same command then continues",
        ) from None
    remember_sha256(path, digest)
    return digest


def write_tensors(
    tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None
) -> str:
    """Write the bytes of `safetensors.torch.save_file` to a new file, and return their hex SHA-256.

    No contiguous tensor of a CPU is copied. A thread hashes each block while it is written.
    """
    header, names = _tensors_header(tensors, metadata)
    digest = hashlib.sha256(header)
    with open(path, "xb") as file, ThreadPoolExecutor(1, "sha256") as thread:
        file.write(header)
        for name in names:
            values = tensors[name].detach().cpu().contiguous()
            # A single number may have any stride.
            flat = values.as_strided((values.numel(),), (1,)).view(torch.uint8)
            data = memoryview(flat.numpy())
            for start in range(0, len(data), _BLOCK_BYTES):
                block = data[start : start + _BLOCK_BYTES]
                hashed = thread.submit(digest.update, block)
                file.write(block)
                hashed.result()
    return digest.hexdigest()


def _tensors_header(
    tensors: dict[str, Tensor], metadata: dict[str, str] | None
) -> tuple[bytes, list[str]]:
    """Return the header of a file of these tensors, and their names in the file's order.

    The format's library orders tensors by dtype and name, and names the dtypes.
    """
    example = save({name: torch.zeros(1, dtype=t.dtype) for name, t in tensors.items()}, metadata)
    entries = json.loads(example[8 : 8 + int.from_bytes(example[:8], "little")])
    names, start = [name for name in entries if name != "__metadata__"], 0
    for name in names:
        end = start + tensors[name].nbytes
        entries[name] |= {"shape": list(tensors[name].shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, names
