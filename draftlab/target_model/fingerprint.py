"""Identify a checkpoint by its content."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from draftlab.errors import UserError
from draftlab.files import canonical_json, parse_json, read_fields
from draftlab.target_model.parts import shard_files

PAGE = 4096
PAGES = 64
"""Pages that are read of a tensor, of checkpoints with up to MOST_PAGES / PAGES tensors."""
MOST_PAGES, LEAST_PAGES = 65_536, 8
"""Pages of a whole checkpoint, and of a tensor in one with very many (a mixture of experts)."""


def fingerprint(folder: Path) -> str:
    """Return hashes of a checkpoint's config and of a sample of every tensor.

    The sample is each tensor's name, dtype, shape and 64 pages of 4 KiB, the first, the last and
    others at equal distances, so a fine-tuned copy differs and a 400 GB target takes seconds.
    Sharding and file names have no effect.

    Returns:
        "2-", 32 hex digits of that sample, "-", and 32 of each tensor's first page alone.
    """
    config = read_fields(folder / "config.json", {}, kind="target's config.json")
    volatile = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")
    settings = canonical_json({k: v for k, v in config.items() if k not in volatile}).encode()
    headers = {file: _read_header(file) for file in shard_files(folder)}
    num_tensors = sum(len(tensors) for _, tensors in headers.values())
    pages = max(LEAST_PAGES, min(PAGES, MOST_PAGES // max(num_tensors, 1)))
    first_pages: list[list[Any]] = []
    all_pages: list[list[Any]] = []
    for file, (data_start, tensors) in headers.items():
        with open(file, "rb") as opened:
            for name, entry in sorted(tensors.items(), key=lambda item: item[1]["data_offsets"]):
                start, end = entry["data_offsets"]
                read = read_pages(opened.fileno(), data_start + start, end - start, pages)
                for samples, content in ((first_pages, read[0]), (all_pages, b"".join(read))):
                    digest = hashlib.sha256(content).hexdigest()
                    samples.append([name, entry["dtype"], entry["shape"], digest])
    of_first, of_all = (
        hashlib.sha256(settings + canonical_json(sorted(sample)).encode()).hexdigest()[:32]
        for sample in (first_pages, all_pages)
    )
    return f"2-{of_all}-{of_first}"


def read_pages(descriptor: int, start: int, size: int, pages: int) -> list[bytes]:
    """Read pages of a tensor of `size` bytes at equal distances, its first and its last included;
    one with fewer pages is read whole.
    """
    if size <= pages * PAGE:
        offsets = list(range(0, max(size, 1), PAGE))
    else:
        offsets = [i * (size - PAGE) // (pages - 1) for i in range(pages)]
    for offset in offsets:  # a disk then reads them all at once
        os.posix_fadvise(descriptor, start + offset, PAGE, os.POSIX_FADV_WILLNEED)
    return [os.pread(descriptor, min(PAGE, size - at), start + at) for at in offsets]


def _read_header(file: Path) -> tuple[int, dict[str, Any]]:
    """Return where a safetensors file's data begin, and its tensors' entries by name."""
    with open(file, "rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        try:
            # A file of another format (a git-lfs pointer, say) gives an absurd size.
            if size > file.stat().st_size:
                raise ValueError
            header: dict[str, Any] = parse_json(opened.read(size))
        except ValueError:
            raise UserError(
                "a safetensors file is truncated or corrupt",
                where=file,
                do="fetch the file again (git clones need git-lfs)",
            ) from None
    header.pop("__metadata__", None)
    return 8 + size, header
