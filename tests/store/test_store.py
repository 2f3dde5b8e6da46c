"""Records are read as they were recorded; foreign, truncated and incomplete stores are refused."""

from __future__ import annotations

import json
import os
import resource
import tempfile
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from draftlab.errors import UserError
from draftlab.files import sha256_file
from draftlab.store.recording_plan import batches_of
from draftlab.store.sample_table import Sample, prediction_mask, teacher_mask
from draftlab.store.shard import list_shards, shard_file
from draftlab.store.shard_files import map_shard
from draftlab.store.store import Store, StoreIdentity
from draftlab.train.batch.loss_rows import loss_reach
from tests.helpers.table_target import (
    BOUNDARIES,
    IDENTITY,
    TARGET,
    VOCAB,
    TableTarget,
    record_table,
    samples_of_lengths,
)


@st.composite
def ragged_samples(draw: st.DrawFn) -> list[Sample]:
    samples = []
    for i in range(draw(st.integers(1, 8))):
        n = draw(st.integers(3, 40))
        ids = draw(st.lists(st.integers(0, VOCAB - 1), min_size=n, max_size=n))
        spans = [*draw(st.lists(st.integers(0, 2), min_size=n - 2, max_size=n - 2)), 3, 3]
        temperature = draw(st.sampled_from([None, 0.0, 0.8]))
        samples.append(Sample(f"naïve/{i}", tuple(ids), tuple(spans), temperature))
    return samples


@settings(max_examples=40, deadline=None)
@given(
    ragged_samples(),
    st.integers(1, 90),
    st.integers(1, 90),
    st.sampled_from(["float32", "bfloat16"]),
    st.booleans(),
)
def test_ragged_round_trip(
    samples: list[Sample], shard_tokens: int, batch_tokens: int, dtype: str, padded: bool
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        target: Any = TableTarget("mixes them" if padded else None)
        sizes = {"shard_tokens": shard_tokens, "batch_tokens": batch_tokens}
        record_table(folder, samples, target, **sizes, dtype=dtype)
        store = Store.open(folder, replace(IDENTITY, dtype=dtype))
        store.verify()
        assert store.ids == [s.id for s in samples]
        assert list(store.lengths) == [len(s.token_ids) for s in samples]
        for shard in store.manifest.shards:
            assert shard.tokens <= shard_tokens or len(shard.ids) == 1
            batches = batches_of(store.manifest, shard)
            assert sorted(i for b in batches for i in b) == list(range(len(shard.ids)))
            for batch in batches:
                lengths = [shard.lengths[i] for i in batch]
                tokens = len(lengths) * max(lengths) if padded else sum(lengths)
                assert tokens <= batch_tokens or len(batch) == 1
        # Backwards, so that no read depends on the one before it.
        for i in reversed(range(len(store))):
            sample, record = samples[i], store[i]
            ids = torch.tensor(sample.token_ids)
            assert torch.equal(record.tokens, ids)
            assert torch.equal(record.spans, torch.tensor(sample.spans))
            assert record.temperature == sample.temperature
            features = torch.cat([TARGET.state(ids, b) for b in BOUNDARIES], -1)
            assert torch.equal(record.features, features.to(record.features.dtype))
            last = TARGET.state(ids, TARGET.num_layers)
            assert torch.equal(record.last, last.to(record.last.dtype))
            logits, taught = TARGET.logits(last), teacher_mask(record.spans)
            torch.testing.assert_close(record.logsumexp[taught], logits.logsumexp(-1)[taught])
            assert torch.equal(record.argmax[taught], logits.argmax(-1)[taught])
            tokens, spans = store.tokens_and_spans(i)
            assert torch.equal(tokens, record.tokens)
            assert torch.equal(spans, record.spans)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30))
def test_prediction_mask_holds_the_labels_of_all_unroll_steps(spans: list[int]) -> None:
    reach = loss_reach(torch.tensor(spans)).tolist()
    labels = {t + 2 + k for t in range(len(spans)) for k in range(reach[t])}
    assert set(prediction_mask(torch.tensor(spans)).nonzero().flatten().tolist()) == labels


def test_the_teacher_of_a_label_is_the_position_before_it() -> None:
    spans = torch.tensor([0, 1, 1, 1, 0, 2, 2, 0, 3])
    assert prediction_mask(spans).nonzero().flatten().tolist() == [2, 3, 6]
    assert teacher_mask(spans).nonzero().flatten().tolist() == [1, 2, 5]


def test_a_record_may_be_changed_in_place(tmp_path: Path) -> None:
    store = record_table(tmp_path, samples_of_lengths([5, 6]))
    before = store[0].features.clone()
    store[0].features.zero_()
    assert torch.equal(store[0].features, before)
    store.verify()


def test_layout_is_the_documented_one(tmp_path: Path) -> None:
    record_table(tmp_path, samples_of_lengths([5, 6]), dtype="bfloat16")
    files = sorted(p.name for p in tmp_path.iterdir())
    columns = ["records.safetensors", "shards.safetensors"]
    assert files == [".lock", "manifest.json", columns[0], "shard-00000.safetensors", columns[1]]
    with safe_open(tmp_path / "shard-00000.safetensors", "pt") as shard:
        slices = {name: shard.get_slice(name) for name in shard.keys()}  # noqa: SIM118
        layout = {name: (s.get_dtype(), s.get_shape()) for name, s in slices.items()}
    assert layout == {
        "features": ("BF16", [11, 8]),
        "last": ("BF16", [11, 4]),
        "tokens": ("I32", [11]),
        "spans": ("I32", [11]),
        "logsumexp": ("F32", [11]),
        "argmax": ("I32", [11]),
        "offsets": ("I64", [3]),
    }
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert list(manifest)[:2] == ["schema", "complete"]
    assert manifest["boundary_meaning"].startswith("input-of-layer")
    assert manifest["identity"]["boundaries"] == [1, 3]
    assert manifest["settings"]["shard_tokens"] == 30


OTHER_IDENTITY = {
    "target_fingerprint": "0" * 64,
    "tokenizer_sha256": "other-tokenizer",
    "template_sha256": "other-template",
    "boundaries": (2, 3),
    "num_layers": 7,
    "hidden_size": 8,
    "vocab_size": 51,
    "dtype": "bfloat16",
}


def test_another_identity_is_refused_with_both_values(tmp_path: Path) -> None:
    assert {*OTHER_IDENTITY, "target_name"} == {f.name for f in fields(StoreIdentity)}
    record_table(tmp_path, samples_of_lengths([5]))
    for key, value in OTHER_IDENTITY.items():
        with pytest.raises(UserError) as caught:
            Store.open(tmp_path, replace(IDENTITY, **{key: value}))
        actual = getattr(IDENTITY, key)
        values = [str(list(v) if isinstance(v, tuple) else v) for v in (value, actual)]
        assert f"{key}: expected {values[0]}, found {values[1]}" in str(caught.value)
        assert str(tmp_path) in str(caught.value)
    Store.open(tmp_path, replace(IDENTITY, target_name="moved"))


@pytest.mark.parametrize("name", ["/data/models/mine", "./models/mine", "~/mine"])
def test_the_name_of_a_local_target_has_no_path(name: str) -> None:
    attributes = ("fingerprint", "num_layers", "hidden_size", "vocab_size")
    target: Any = SimpleNamespace(
        **{key: getattr(TARGET, key) for key in attributes},
        name=name,
        folder=Path("/data/models/mine"),
    )
    identity = StoreIdentity.of(
        target, tokenizer_sha256="", template_sha256="", boundaries=(1,), dtype="float32"
    )
    assert identity.target_name == "mine"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"complete": False}, "interrupted"),
        ({"surprise": 1}, "surprise"),
        *(({"schema": 1, "shards": shards}, "shards") for shards in (5, {"a": 1}, ["a"], [None])),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(tmp_path: Path, changes: dict, words: str) -> None:
    record_table(tmp_path, samples_of_lengths([5]))
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(UserError, match=words):
        Store.open(tmp_path)


def test_shards_that_are_missing_truncated_or_corrupt_are_refused(tmp_path: Path) -> None:
    record_table(tmp_path, samples_of_lengths([20, 20, 20]))
    shard = tmp_path / "shard-00001.safetensors"
    good = shard.read_bytes()
    os.truncate(shard, len(good) - 1)
    with pytest.raises(UserError, match=f"{len(good)} bytes, found {len(good) - 1}") as caught:
        Store.open(tmp_path)
    assert shard.name in caught.value.where

    shard.write_bytes(b"\xff" * len(good))
    store = Store.open(tmp_path)
    _ = store[0]
    with pytest.raises(UserError, match="corrupt") as caught:
        _ = store[1]
    assert shard.name in caught.value.where

    shard.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(UserError, match="SHA-256") as caught:
        Store.open(tmp_path).verify()
    assert shard.name in caught.value.where

    shard.unlink()
    with pytest.raises(UserError, match="missing") as caught:
        Store.open(tmp_path)
    assert shard.name in caught.value.where
    shard.write_bytes(good)
    Store.open(tmp_path).verify()


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("tokens", lambda t: t.index_fill(0, torch.tensor([3]), 50), "tokens: expected 0 to 49"),
        ("tokens", lambda t: t - 50, "tokens: expected 0 to 49"),
        ("tokens", lambda t: t.float(), "tokens: expected torch.int32, found torch.float32"),
        ("argmax", lambda t: t.fill_(50), "argmax: expected -1 to 49"),
        ("spans", lambda t: t - 1, "spans: expected 0 to"),
        ("last", lambda t: t.double(), "last: expected torch.float32, found torch.float64"),
    ],
)
def test_a_shard_with_other_dtypes_or_values_is_refused(
    tmp_path: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor], words: str
) -> None:
    """They would read beyond the end of a table on a GPU."""
    store = record_table(tmp_path, samples_of_lengths([8, 12]))
    path = tmp_path / store.manifest.shards[0].file
    tensors = load_file(path)
    save_file(tensors | {name: change(tensors[name])}, path)
    with pytest.raises(UserError, match=words) as caught:
        map_shard(store.files, store.manifest.shards[0], store.identity, "record again")
    assert path.name in caught.value.where


def test_a_shard_of_another_store_with_the_same_size_is_refused(tmp_path: Path) -> None:
    record_table(tmp_path / "a", samples_of_lengths([8, 12]))
    record_table(tmp_path / "b", samples_of_lengths([12, 8]))
    name = "shard-00000.safetensors"
    (tmp_path / "a" / name).write_bytes((tmp_path / "b" / name).read_bytes())
    with pytest.raises(UserError, match="another store"):
        _ = Store.open(tmp_path / "a")[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8"])
def test_a_shard_has_the_bytes_that_safetensors_writes(tmp_path: Path, dtype: str) -> None:
    store = record_table(tmp_path / "store", samples_of_lengths([9, 20]), dtype=dtype)
    shard = store.manifest.shards[0]
    path = tmp_path / "store" / shard.file
    save_file(load_file(path), tmp_path / "expected.safetensors")
    assert path.read_bytes() == (tmp_path / "expected.safetensors").read_bytes()
    assert shard.sha256 == sha256_file(path)
    assert shard.bytes == path.stat().st_size


def test_few_shards_are_mapped_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def num_mapped() -> int:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return len({line.split()[-1] for line in lines if f"{tmp_path}/shard-" in line})

    record_table(tmp_path, samples_of_lengths([20] * 9))
    monkeypatch.setattr("draftlab.store.store.OPEN_SHARDS", 3)
    store = Store.open(tmp_path)
    first = store.view(0)
    for i in range(9):
        assert torch.equal(store[i].tokens, torch.tensor([(i + t) % VOCAB for t in range(20)]))
    assert num_mapped() == 3 + 1  # and the one of which a record is in use
    assert torch.equal(first.tokens, torch.arange(20, dtype=torch.int32))
    del first
    assert num_mapped() == 3


def test_a_lack_of_memory_is_no_corrupt_shard(tmp_path: Path) -> None:
    store = record_table(tmp_path, samples_of_lengths([20]))
    path = tmp_path / "shard-00000.safetensors"
    save_file({"a": torch.zeros(100 << 18)}, path)  # 100 MiB, which are not left
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (50 << 20), before[1]))
    try:
        with pytest.raises(UserError, match="no memory to map a shard") as caught:
            store.view(0)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert "vm.max_map_count" in caught.value.do
    assert "remove" not in caught.value.do


def test_no_shard_lists_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lists = 0
    scandir = os.scandir

    def count(*arguments: Any) -> Any:
        nonlocal lists
        lists += str(arguments[0]) == str(tmp_path)
        return scandir(*arguments)

    monkeypatch.setattr(os, "scandir", count)
    record_table(tmp_path, samples_of_lengths([20] * 12))
    assert lists <= 7


SHARDS = {0: 3, 7: 0, 99_999: 5, 100_000: 1, 10**17: 2}
OTHERS = (
    *("shard-0.safetensors", "shard-1234.safetensors", "shard-000001.safetensors"),
    *("shard-١٢٣٤٥.safetensors", "shard-²²²²².safetensors", "shard-00001.safetensors.tmp"),
    *("Shard-00001.safetensors", ".shard-00001.safetensors", "manifest.json", "shard-00001"),
)


def test_only_files_with_names_of_shards_are_shards(tmp_path: Path) -> None:
    files = {shard_file(number): size for number, size in SHARDS.items()} | dict.fromkeys(OTHERS, 1)
    for name, size in files.items():
        (tmp_path / name).write_bytes(b"x" * size)
    (tmp_path / shard_file(8)).mkdir()
    os.utime(tmp_path / shard_file(7), ns=(1, 123_456_789))
    listed = list_shards(tmp_path)
    assert {number: size for number, (size, _) in listed.items()} == SHARDS
    assert listed[7] == (0, 123_456_789)
    assert list_shards(tmp_path / "nothing") == {}


def test_a_link_in_the_folder_is_followed_and_one_out_of_it_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    (folder / "kept").write_bytes(b"four")
    (folder / shard_file(0)).symlink_to("kept")
    (folder / shard_file(1)).symlink_to("nothing")
    assert [size for size, _ in list_shards(folder).values()] == [4]
    (tmp_path / "secret").write_bytes(b"secret")
    (folder / shard_file(2)).symlink_to("../secret")
    with pytest.raises(UserError, match="symbolic link that leads out of it"):
        list_shards(folder)
