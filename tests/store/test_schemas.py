"""Older stores are read, continued and identified as they were; columns are checked and mapped."""

from __future__ import annotations

import hashlib
import json
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save

from draftlab.errors import UserError
from draftlab.progress import Monitor
from draftlab.store.columns import columns_sha256
from draftlab.store.manifest import Manifest
from draftlab.store.receipts import Receipts
from draftlab.store.record_index import RECORDS, RecordIndex
from draftlab.store.recording_plan import plan_recording
from draftlab.store.samples import Sample
from draftlab.store.shard import shard_file
from draftlab.store.shard_table import SHARDS, ShardTable, WrittenShard
from draftlab.store.store import Store
from tests.helpers.older_stores import write_manifest, write_older_schema
from tests.helpers.recordings import file_hashes
from tests.helpers.table_target import (
    IDENTITY,
    SETTINGS,
    TARGET,
    record_table,
    samples_of_lengths,
)

BLANK: dict[str, Any] = {"bytes": None, "sha256": None, "not_finite": {}, "fp8_errors": []}
SAMPLES = [
    Sample(f"naïve {i}", sample.token_ids, sample.spans, [0.5, None, 0.0][i % 3])
    for i, sample in enumerate(samples_of_lengths([12, 17, 9, 30, 8, 21, 25]))
]


def canonical_sha256(fields: dict[str, Any]) -> str:
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize("schema", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "fp8"])
def test_an_older_store_has_its_records_and_its_digest(
    tmp_path: Path, schema: int, dtype: str
) -> None:
    new = record_table(tmp_path, SAMPLES, dtype=dtype)
    assert list(new.ids) == [sample.id for sample in SAMPLES]
    fields = json.loads(json.dumps(write_older_schema(tmp_path, schema)))
    assert bool(fields["shards"][0]["fp8_errors"]) == (dtype == "fp8")
    old = Store.open(tmp_path, replace(IDENTITY, dtype=dtype))
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
    assert old.manifest.identifying_fields() == fields  # in the key of a training


@pytest.mark.parametrize("schema", [1, 2])
def test_an_older_recording_continues_to_the_same_bytes(tmp_path: Path, schema: int) -> None:
    record_table(tmp_path, SAMPLES)
    complete = write_older_schema(tmp_path, schema)
    expected = file_hashes(tmp_path)
    plan = complete | {"complete": False}
    plan["shards"] = [shard | BLANK for shard in complete["shards"]]
    write_manifest(tmp_path, plan)
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


@pytest.mark.parametrize("schema", [1, 2])
def test_a_lost_shard_of_an_older_store_is_made_again(tmp_path: Path, schema: int) -> None:
    record_table(tmp_path, SAMPLES)
    write_older_schema(tmp_path, schema)
    expected = file_hashes(tmp_path)
    (tmp_path / "shard-00002.safetensors").unlink()
    record_table(tmp_path, SAMPLES)
    assert file_hashes(tmp_path) == expected


def test_plans_in_older_schemas_are_those_of_older_versions() -> None:
    """Their hashes, which receipts and keys depend on, were taken with the version before."""
    plan, _ = plan_recording(TARGET, SAMPLES, SETTINGS, IDENTITY, monitor=Monitor())
    assert plan.in_schema(3) == plan
    plan_2, plan_1 = plan.in_schema(2), plan.in_schema(1)
    assert plan_2.records_sha256 == (
        "706d6bd41c0b7c64798697a9ae6d9c7fb0de49f27a00acef45d2b8cb082560e6"
    )
    keys = [Receipts(Path(), plan).key for plan in (plan_1, plan_2)]
    assert keys == [
        "26f57990a6c00a081311813b4e01f9e739144f1a3d1d21ddf933a7df216b77ce",
        "7045f5ba744e4516dd7113108d0eb24ded2fcebfeb3ac5b5e51c36dbbc897f97",
    ]


@pytest.mark.parametrize("schema", [2, 3])
def test_a_damaged_index_is_refused_and_written_again(tmp_path: Path, schema: int) -> None:
    record_table(tmp_path, SAMPLES)
    if schema < 3:
        write_older_schema(tmp_path, schema)
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


@pytest.mark.parametrize("content", [b"damaged", None])
def test_a_damaged_table_of_shards_is_refused(tmp_path: Path, content: bytes | None) -> None:
    record_table(tmp_path, SAMPLES)
    (tmp_path / SHARDS).unlink()
    if content is not None:
        (tmp_path / SHARDS).write_bytes(content)
    for read in (lambda: Store.open(tmp_path), lambda: record_table(tmp_path, SAMPLES)):
        with pytest.raises(UserError, match="table of the store's shards is missing") as caught:
            read()
        assert caught.value.where == str(tmp_path / SHARDS)


@pytest.mark.parametrize("schema", [1, 2])
def test_an_older_manifest_without_shards_is_refused(tmp_path: Path, schema: int) -> None:
    record_table(tmp_path, SAMPLES)
    write_manifest(tmp_path, write_older_schema(tmp_path, schema) | {"shards": []})
    with pytest.raises(UserError, match="shards: expected at least one value") as caught:
        Store.open(tmp_path)
    assert caught.value.where.endswith("manifest.json")
    assert "record again" in caught.value.do


FORGED_SHARDS: list[tuple[int, str, Any]] = [
    *((1, "lengths", [length, 17]) for length in (2**31, 2**63, 10**30, -1)),
    (1, "lengths", [12]),
    (1, "batches", [[0], [2]]),
    (1, "batches", [[0, 0]]),
    (1, "batches", [[], [0, 1]]),
    *((2, "records", records) for records in (2**31, 2**63, 10**30)),
    *((schema, "bytes", 2**63) for schema in (1, 2)),
]


@pytest.mark.parametrize(("schema", "key", "value"), FORGED_SHARDS)
def test_a_forged_older_manifest_is_refused(
    tmp_path: Path, schema: int, key: str, value: Any
) -> None:
    record_table(tmp_path, SAMPLES)
    fields = write_older_schema(tmp_path, schema)
    fields["shards"][0][key] = value
    write_manifest(tmp_path, fields)
    with pytest.raises(UserError, match="one that does not fit the schema") as caught:
        Store.open(tmp_path)
    assert caught.value.where.endswith("manifest.json")


def test_an_older_index_with_too_large_lengths_is_refused(tmp_path: Path) -> None:
    record_table(tmp_path, SAMPLES)
    write_older_schema(tmp_path, 2)
    columns = load((tmp_path / RECORDS).read_bytes())
    columns["lengths"] = columns["lengths"] + 2**31
    refuse_index(tmp_path, save(columns))


def test_a_complete_manifest_without_hashes_is_refused(tmp_path: Path) -> None:
    record_table(tmp_path, SAMPLES)
    fields = json.loads((tmp_path / "manifest.json").read_text())
    write_manifest(tmp_path, fields | {"shards_sha256": None})
    with pytest.raises(UserError, match="hashes of a complete store's shards"):
        Store.open(tmp_path)


def test_a_large_manifest_is_columns(tmp_path: Path) -> None:
    """Of 2,000 shards and 100,000 records nothing becomes a Python object when they are opened."""
    shards, records = 2_000, 100_000
    index = RecordIndex.of(
        [f"record {number}" for number in range(records)],
        np.full(records, 7),
        np.full(records, np.nan),
        [records // shards] * shards,
        [[]] * shards,
    )
    plan, _ = plan_recording(TARGET, SAMPLES, SETTINGS, IDENTITY, monitor=Monitor())
    fields = plan.model_dump(
        exclude={"complete", "records_sha256", "shards_sha256"}, by_alias=False
    )
    manifest = Manifest.plan(index, **fields)
    written = WrittenShard(bytes=3, sha256="0a" * 32)
    manifest.completed(ShardTable.of(index, 0, [written] * shards)).write(tmp_path)
    for number in range(shards):
        (tmp_path / shard_file(number)).write_bytes(b"abc")
    assert (tmp_path / "manifest.json").stat().st_size < 2_000

    Store.open(tmp_path)  # what is imported or cached is so now
    tracemalloc.start()
    store = Store.open(tmp_path)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 300_000
    assert peak < 1_500_000  # columns of flags and hashed blocks; a list of the ids takes 8 MB
    assert store.manifest.index.lengths.base is not None  # mapped, and shared with other processes
    last = store.manifest.shards[-1]
    assert last.ids == [f"record {number}" for number in range(records - 50, records)]
    assert (last.batches, last.tokens, last.sha256) == ([], 350, "0a" * 32)
    assert store.shards_of([0, 49, 50, records - 1]) == [0, 1, shards - 1]


def lengthen_ids(columns: dict[str, np.ndarray]) -> None:
    columns["id_ends"] = columns["id_ends"] * 1000


FORGED = {
    "a column is missing": lambda columns: columns.pop("id_bytes"),
    "another dtype": lambda columns: columns.update(lengths=columns["lengths"].astype(np.float32)),
    "a column is shorter": lambda columns: columns.update(lengths=columns["lengths"][:-1].copy()),
    "ids end beyond the text": lengthen_ids,
    "a negative length": lambda columns: columns["lengths"].__setitem__(0, -5),
    "a shard has more records": lambda columns: columns["shard_records"].__setitem__(0, 9),
    "numbers of records whose sum overflows": lambda columns: columns.update(
        shard_records=np.array([2**63 - 1, 2**63 - 1, len(SAMPLES) + 2])
    ),
    "no shards": lambda columns: columns.update(shard_records=columns["shard_records"][:0].copy()),
}


@pytest.mark.parametrize("change", FORGED.values(), ids=list(FORGED))
def test_a_forged_index_is_refused(tmp_path: Path, change: Callable[[dict], object]) -> None:
    record_table(tmp_path, SAMPLES)
    columns = {key: value.copy() for key, value in load((tmp_path / RECORDS).read_bytes()).items()}
    change(columns)
    refuse_index(tmp_path, save(columns))


@pytest.mark.parametrize(("column", "place", "value"), [("id_bytes", 5, 0xFF), ("id_ends", 0, 3)])
def test_forged_ids_that_are_not_utf_8_are_refused(
    tmp_path: Path, column: str, place: int, value: int
) -> None:
    record_table(tmp_path, SAMPLES)
    columns = load((tmp_path / RECORDS).read_bytes())
    columns[column][place] = value
    replace_columns(tmp_path, RECORDS, "records_sha256", save(columns))
    store = Store.open(tmp_path)
    for read in (lambda: list(store.ids), lambda: store[0]):
        with pytest.raises(UserError, match="expected texts in UTF-8 in the store's columns"):
            read()


def header(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\4" + 7 * b"\0" + b"abcd",
        7 * b"\1" + b"\0" + b"{}",
        header(b"[" * 100_000),
        header(b'{"id_bytes":{"dtype":"U8","shape":[%d],"data_offsets":[0,0]}}' % 10**30),
    ],
)
def test_another_file_is_no_index(tmp_path: Path, content: bytes) -> None:
    record_table(tmp_path, SAMPLES)
    refuse_index(tmp_path, content)


def refuse_index(folder: Path, content: bytes) -> None:
    """Check that an index is refused whose hash the manifest has."""
    replace_columns(folder, RECORDS, "records_sha256", content)
    with pytest.raises(UserError, match="expected the index of the store's records") as caught:
        Store.open(folder)
    assert caught.value.where == str(folder / RECORDS)


def replace_columns(folder: Path, name: str, key: str, content: bytes) -> None:
    """Write a file of columns and its hash in the manifest."""
    (folder / name).write_bytes(content)
    fields = json.loads((folder / "manifest.json").read_text())
    write_manifest(folder, fields | {key: hashlib.sha256(content).hexdigest()})


FORGED_TABLES = {
    "a column is missing": lambda columns: columns.pop("sha256"),
    "fewer shards": lambda columns: columns.update(bytes=columns["bytes"][:-1].copy()),
    "shorter hashes": lambda columns: columns.update(sha256=columns["sha256"][:, :-1].copy()),
    "a record that is not there": lambda columns: columns.update(
        not_finite_records=np.array([99]),
        not_finite_ends=np.array([0]),
    ),
    "more places than records": lambda columns: columns.update(not_finite_ends=np.array([0])),
}


@pytest.mark.parametrize("change", FORGED_TABLES.values(), ids=list(FORGED_TABLES))
def test_a_forged_table_is_refused(tmp_path: Path, change: Callable[[dict], object]) -> None:
    record_table(tmp_path, SAMPLES)
    columns = {key: value.copy() for key, value in load((tmp_path / SHARDS).read_bytes()).items()}
    change(columns)
    replace_columns(tmp_path, SHARDS, "shards_sha256", save(columns))
    with pytest.raises(UserError, match="expected the table of the store's shards") as caught:
        Store.open(tmp_path)
    assert caught.value.where == str(tmp_path / SHARDS)


def test_columns_are_written_as_safetensors_writes_them(tmp_path: Path) -> None:
    store = record_table(tmp_path, SAMPLES, dtype="fp8")
    for name, columns in (
        (RECORDS, store.manifest.index.columns(3)),
        (SHARDS, store.manifest.written.columns()),
    ):
        content = (tmp_path / name).read_bytes()
        assert content == save({key: np.array(value) for key, value in columns.items()})
        assert columns_sha256(columns) == hashlib.sha256(content).hexdigest()
