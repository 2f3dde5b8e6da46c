"""Stores as older versions wrote them, made from a store of the present schema."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from draftlab.store.store import Store


def write_older_schema(folder: Path, schema: int) -> dict[str, Any]:
    """Turn a store into one of schema 1 or 2; return the content of its manifest."""
    store = Store.open(folder)
    fields = json.loads((folder / "manifest.json").read_text()) | {"schema": schema}
    del fields["shards_sha256"]
    columns = load((folder / "records.safetensors").read_bytes())
    del columns["shard_records"]
    columns["lengths"] = columns["lengths"].astype(np.int64)
    index = save(columns)
    fields["records_sha256"] = hashlib.sha256(index).hexdigest()
    names = ("ids", "lengths", "temperatures", "batches") if schema == 1 else ("records", "tokens")
    written = ("bytes", "sha256", "not_finite", "fp8_errors")
    fields["shards"] = [
        {name: getattr(shard, name) for name in ("file", *names, *written)}
        for shard in store.manifest.shards
    ]
    (folder / "records.safetensors").unlink()  # a store that has it mapped keeps it
    if schema == 1:
        del fields["records_sha256"]
    else:
        (folder / "records.safetensors").write_bytes(index)
    (folder / "shards.safetensors").unlink()
    write_manifest(folder, fields)
    return fields


def write_manifest(folder: Path, fields: dict[str, Any]) -> None:
    text = json.dumps(fields, indent=2, ensure_ascii=False) + "\n"
    (folder / "manifest.json").write_text(text)
