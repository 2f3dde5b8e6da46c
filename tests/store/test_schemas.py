"""Stores of schema 1 are read, continued and identified as they were; schema 2 has an index."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save

from draftlab.errors import UserError
from draftlab.store.manifest import Manifest, Shard
from draftlab.store.record_index import RECORDS
from draftlab.store.samples import Sample
from draftlab.store.store import Store
from tests.helpers.recordings import file_hashes
from tests.helpers.table_target import IDENTITY, record_table, samples_of_lengths

BLANK: dict[str, Any] = {"bytes": None, "sha256": None, "not_finite": {}, "fp8_errors": []}
SAMPLES = [
    Sample(f"naïve {i}", sample.token_ids, sample.spans, [0.5, None, 0.0][i % 3])
    for i, sample in enumerate(samples_of_lengths([12, 17, 9, 30, 8, 21, 25]))
]


def canonical_sha256(fields: dict[str, Any]) -> str:
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def write_schema_1(folder: Path) -> dict[str, Any]:
    """Turn a store's manifest into the one that older versions wrote; return its fields."""
    store = Store.open(folder)
    fields = json.loads((folder / "manifest.json").read_text()) | {"schema": 1}
    del fields["records_sha256"]
    for shard, records in zip(fields["shards"], store.manifest.shards, strict=True):
        del shard["records"], shard["tokens"]
        rest = [(key, shard.pop(key)) for key in list(shard) if key != "file"]
        for name in ("ids", "lengths", "temperatures", "batches"):
            shard[name] = getattr(records, name)
        shard |= dict(rest)
    (folder / RECORDS).unlink()
    write(folder, fields)
    return fields


def write(folder: Path, fields: dict[str, Any]) -> None:
    text = json.dumps(fields, indent=2, ensure_ascii=False) + "\n"
    (folder / "manifest.json").write_text(text)


def test_a_store_of_schema_1_has_its_records_and_its_digest(tmp_path: Path) -> None:
    new = record_table(tmp_path, SAMPLES)
    assert list(new.ids) == [sample.id for sample in SAMPLES]
    fields = write_schema_1(tmp_path)
    old = Store.open(tmp_path, IDENTITY)
    old.verify()
    assert old.ids == list(new.ids)
    assert old.lengths == [12, 17, 9, 30, 8, 21, 25]
    assert old.temperatures == [0.5, None, 0.0, 0.5, None, 0.0, 0.5]
    assert [shard.batches for shard in old.manifest.shards] == [
        shard.batches for shard in new.manifest.shards
    ]
    assert old.manifest.dump() == fields
    fields["schema_version"] = fields.pop("schema")
    assert old.digest == canonical_sha256(fields)
    assert old.manifest.model_dump(mode="json") == fields  # in the key of a training


def test_a_recording_of_schema_1_continues_to_the_same_bytes(tmp_path: Path) -> None:
    record_table(tmp_path, SAMPLES)
    complete = write_schema_1(tmp_path)
    expected = file_hashes(tmp_path)
    plan = complete | {"complete": False}
    plan["shards"] = [shard | BLANK for shard in complete["shards"]]
    write(tmp_path, plan)
    for number, shard in enumerate(complete["shards"]):
        path = tmp_path / shard["file"]
        if number < 2:
            receipt = {key: shard[key] for key in BLANK} | {"plan": canonical_sha256(plan)}
            path.with_suffix(".json").write_text(json.dumps(receipt))
        else:
            path.unlink()
    times = [(tmp_path / f"shard-0000{i}.safetensors").stat().st_mtime_ns for i in range(2)]
    record_table(tmp_path, SAMPLES)
    assert file_hashes(tmp_path) == expected
    assert times == [(tmp_path / f"shard-0000{i}.safetensors").stat().st_mtime_ns for i in range(2)]


def test_a_damaged_index_is_refused_and_written_again(tmp_path: Path) -> None:
    record_table(tmp_path, SAMPLES)
    expected = file_hashes(tmp_path)
    index = tmp_path / RECORDS
    good = index.read_bytes()
    for content in (good[:-1] + b"\7", good[:100], None):
        index.unlink()
        if content is not None:
            index.write_bytes(content)
        with pytest.raises(UserError, match="index of the store's records") as caught:
            Store.open(tmp_path)
        assert caught.value.where == str(index)
        record_table(tmp_path, SAMPLES)
        assert file_hashes(tmp_path) == expected
    index.rename(tmp_path.parent / "elsewhere")
    index.symlink_to(tmp_path.parent / "elsewhere")
    with pytest.raises(UserError, match="missing or damaged"):
        Store.open(tmp_path)


@pytest.mark.parametrize("schema", [1, 2])
def test_a_manifest_without_shards_is_refused(tmp_path: Path, schema: int) -> None:
    manifest = record_table(tmp_path, SAMPLES).manifest
    manifest = manifest.model_copy(update={"schema_version": schema, "shards": []})
    empty = Shard.of("shard-00000.safetensors", [], [], [], [])._window.index.to_bytes()
    (tmp_path / RECORDS).write_bytes(empty)
    manifest.records_sha256 = hashlib.sha256(empty).hexdigest()
    (tmp_path / "manifest.json").write_text(json.dumps(manifest.dump()))
    with pytest.raises(UserError, match="shards: expected at least one value") as caught:
        Store.open(tmp_path)
    assert caught.value.where.endswith("manifest.json")
    assert "record again" in caught.value.do


def test_the_manifest_does_not_grow_with_its_records(tmp_path: Path) -> None:
    count = 20_000
    ids = [f"record {number}" for number in range(count)]
    shard = Shard.of("shard-00000.safetensors", ids, [7] * count, [None] * count, [])
    manifest = record_table(tmp_path / "small", SAMPLES).manifest
    (tmp_path / "large").mkdir()
    manifest.model_copy(update={"shards": [shard] * 2}).with_index().write(tmp_path / "large")
    assert (tmp_path / "large" / "manifest.json").stat().st_size < 2_000
    read = Manifest.read(tmp_path / "large" / "manifest.json")
    assert read.shards[1].ids == ids
    assert read.shards[1].batches == []
    assert read.index.lengths.base is not None  # mapped, and shared with other processes


def lengthen_ids(columns: dict[str, np.ndarray]) -> None:
    columns["id_ends"] = columns["id_ends"] * 1000


FORGED = {
    "a column is missing": lambda columns: columns.pop("id_bytes"),
    "another dtype": lambda columns: columns.update(lengths=columns["lengths"].astype(np.float32)),
    "a column is shorter": lambda columns: columns.update(lengths=columns["lengths"][:-1].copy()),
    "ids end beyond the text": lengthen_ids,
    "a negative length": lambda columns: columns["lengths"].__setitem__(0, -5),
}


@pytest.mark.parametrize("change", FORGED.values(), ids=list(FORGED))
def test_a_forged_index_is_refused(tmp_path: Path, change: Callable[[dict], object]) -> None:
    record_table(tmp_path, SAMPLES)
    columns = {key: value.copy() for key, value in load((tmp_path / RECORDS).read_bytes()).items()}
    change(columns)
    refuse_index(tmp_path, save(columns))


@pytest.mark.parametrize("content", [b"", b"\4" + 7 * b"\0" + b"abcd", 7 * b"\1" + b"\0" + b"{}"])
def test_another_file_is_no_index(tmp_path: Path, content: bytes) -> None:
    record_table(tmp_path, SAMPLES)
    refuse_index(tmp_path, content)


def refuse_index(folder: Path, content: bytes) -> None:
    """Check that an index is refused whose hash the manifest has."""
    (folder / RECORDS).write_bytes(content)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["records_sha256"] = hashlib.sha256(content).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="expected the index of a store's records") as caught:
        Store.open(folder)
    assert caught.value.where == str(folder / RECORDS)
