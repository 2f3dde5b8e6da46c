"""Identify a checkpoint by its content."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from draftlab.errors import UserError
from draftlab.files import canonical_json, read_json
from draftlab.target_model.parts import shard_files


def fingerprint(folder: Path) -> str:
    """Return the hex SHA-256 of a checkpoint's config and of a sample of every tensor.

    The sample is each tensor's name, dtype, shape and first 4 KiB, so a fine-tuned copy differs and
    a 400 GB target takes seconds. Sharding and file names have no effect.
    """
    config = read_json(folder / "config.json", kind="target's config.json")
    volatile = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")
    digest = hashlib.sha256(
        canonical_json({k: v for k, v in config.items() if k not in volatile}).encode()
    )
    samples = []
    for file in shard_files(folder):
        with open(file, "rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            try:
                # A file of another format (a git-lfs pointer, say) gives an absurd size.
                if size > file.stat().st_size:
                    raise ValueError
                header: dict[str, Any] = json.loads(opened.read(size))
            except ValueError:
                raise UserError(
                    "a safetensors file is truncated or corrupt",
                    where=file,
                    do="fetch the file again (git clones need git-lfs)",
                ) from None
            for name, entry in header.items():
                if name == "__metadata__":
                    continue
                start, end = entry["data_offsets"]
                opened.seek(8 + size + start)
                sample = hashlib.sha256(opened.read(min(end - start, 4096))).hexdigest()
                samples.append([name, entry["dtype"], entry["shape"], sample])
    digest.update(canonical_json(sorted(samples)).encode())
    return digest.hexdigest()
