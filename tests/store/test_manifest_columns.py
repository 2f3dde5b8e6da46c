"""Columns of a store's manifest are checked and mapped; damaged and forged ones are refused."""

from __future__ import annotations

import hashlib
import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save

from draftlab.errors import UserError
from draftlab.progress import Monitor
from draftlab.store.manifest import Manifest
from draftlab.store.record_index import RECORDS, RecordIndex
from draftlab.store.recording_plan import plan_recording
from draftlab.store.sample_table import Sample
from draftlab.store.shard import SHARDS, ShardTable, WrittenShard, shard_file
from draftlab.store.store import Store
from tests.helpers.recordings import file_hashes
from tests.helpers.table_target import (
    IDENTITY,
    SETTINGS,
    TARGET,
    record_table,
    samples_of_lengths,
)

SAMPLES = [
    Sample(f"naïve {i}", sample.token_ids, sample.spans, [0.5, None, 0.0][i % 3])
    for i, sample in enumerate(samples_of_lengths([12, 17, 9, 30, 8, 21, 25]))
]


def write_manifest(folder: Path, fields: dict[str, Any]) -> None:
    text = json.dumps(fields, indent=2, ensure_ascii=False) + "\n"
    (folder / "manifest.json").write_text(text)


@pytest.mark.parametrize("schema", [0, 2, True, "1", None])
def test_another_schema_is_refused(tmp_path: Path, schema: object) -> None:
    record_table(tmp_path, SAMPLES)
    fields = json.loads((tmp_path / "manifest.json").read_text())
    write_manifest(tmp_path, fields | {"schema": schema})
    with pytest.raises(UserError, match=f"expected store schema 1, found {schema}"):
        Store.open(tmp_path)


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
    )
    plan, _ = plan_recording(TARGET, SAMPLES, SETTINGS, IDENTITY, monitor=Monitor())
    fields = plan.model_dump(exclude={"complete", "records_sha256", "shards_sha256"})
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
    assert (last.tokens, last.sha256) == (350, "0a" * 32)
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


FORGED_TABLES = {
    "a column is missing": lambda columns: columns.pop("sha256"),
    "fewer shards": lambda columns: columns.update(bytes=columns["bytes"][:-1].copy()),
    "shorter hashes": lambda columns: columns.update(sha256=columns["sha256"][:, :-1].copy()),
}
FILES = {
    RECORDS: ("records_sha256", "index of the store's records", FORGED),
    SHARDS: ("shards_sha256", "table of the store's shards", FORGED_TABLES),
}


@pytest.mark.parametrize(("file", "fault"), [(name, f) for name in FILES for f in FILES[name][2]])
def test_forged_columns_are_refused(tmp_path: Path, file: str, fault: str) -> None:
    record_table(tmp_path, SAMPLES)
    content = (tmp_path / file).read_bytes()
    columns = {key: value.copy() for key, value in load(content).items()}
    FILES[file][2][fault](columns)
    refuse(tmp_path, file, save(columns))


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
    refuse(tmp_path, RECORDS, content)


def refuse(folder: Path, file: str, content: bytes) -> None:
    """Check that a file of columns is refused whose hash the manifest has."""
    key, kind, _ = FILES[file]
    replace_columns(folder, file, key, content)
    with pytest.raises(UserError, match=f"expected the {kind}") as caught:
        Store.open(folder)
    assert caught.value.where == str(folder / file)


def replace_columns(folder: Path, name: str, key: str, content: bytes) -> None:
    """Write a file of columns and its hash in the manifest."""
    (folder / name).write_bytes(content)
    fields = json.loads((folder / "manifest.json").read_text())
    write_manifest(folder, fields | {key: hashlib.sha256(content).hexdigest()})
