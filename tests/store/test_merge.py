"""A merged store holds every record once, bit for bit; `inspect` counts them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from draftlab.errors import UserError
from draftlab.progress import Monitor
from draftlab.store.merge import merge
from draftlab.store.sample_table import SampleTable
from draftlab.store.store import Store
from tests.helpers.small_run import draftlab, ran
from tests.helpers.table_target import record_table, samples_of_lengths


def same_record(store: Store, index: int, other: Store, other_index: int) -> bool:
    a, b = vars(store.view(index)), vars(other.view(other_index))
    values = [(a[name], b[name]) for name in a if name != "id"]
    return all(
        torch.equal(x.view(torch.uint8), y.view(torch.uint8))
        if isinstance(x, torch.Tensor)
        else x == y
        for x, y in values
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_merged_records_equal_those_of_the_parts(tmp_path: Path, dtype: str) -> None:
    one = record_table(tmp_path / "a", samples_of_lengths([20, 9, 30], "a"), dtype=dtype)
    cut = {"dtype": dtype, "max_length": 25}
    two = record_table(tmp_path / "b", samples_of_lengths([5, 40], "b"), **cut)
    merged = merge([one, two], tmp_path / "c", Monitor())
    merged.verify()
    assert merged.ids == [*one.ids, *two.ids]
    assert list(merged.lengths) == [20, 9, 30, 5, 25]
    for index in range(5):
        source, source_index = (one, index) if index < 3 else (two, index - 3)
        assert same_record(source, source_index, merged, index)
    counts = merged.manifest.counts
    assert (counts.records, counts.tokens, merged.manifest.truncated) == (5, 89, 1)
    files = [tmp_path / "a" / one.manifest.shards[0].file, tmp_path / "c/shard-00000.safetensors"]
    assert len({os.stat(file).st_ino for file in files}) == 1
    # The merged store does not need the parts.
    for path in (tmp_path / "a").iterdir():
        path.unlink()
    Store.open(tmp_path / "c").verify()


def test_shards_are_copied_where_they_cannot_be_linked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    one = record_table(tmp_path / "a", samples_of_lengths([20, 9], "a"))
    monkeypatch.setattr(os, "link", refuse)
    merge([one], tmp_path / "c", Monitor()).verify()


def test_a_shard_that_is_a_link_in_its_folder_is_merged_as_a_file(tmp_path: Path) -> None:
    one = record_table(tmp_path / "a", samples_of_lengths([20, 9], "a"))
    shard = tmp_path / "a" / one.manifest.shards[0].file
    shard.rename(shard.with_name("states.safetensors"))
    shard.symlink_to("states.safetensors")
    (tmp_path / "link").symlink_to("a")
    merge([Store.open(tmp_path / "link")], tmp_path / "c", Monitor()).verify()
    assert not (tmp_path / "c" / "shard-00000.safetensors").is_symlink()


def test_stores_that_cannot_be_merged_or_continued_are_refused(tmp_path: Path) -> None:
    one = record_table(tmp_path / "a", samples_of_lengths([20, 9]))
    two = record_table(tmp_path / "b", samples_of_lengths([9]))
    with pytest.raises(UserError, match="every record in one store, found 's0'"):
        merge([one, two], tmp_path / "c", Monitor())
    other = record_table(tmp_path / "d", samples_of_lengths([9], "d"), dtype="bfloat16")
    with pytest.raises(UserError, match="dtype: expected float32, found bfloat16") as raised:
        merge([one, other], tmp_path / "c", Monitor())
    assert "remove" not in raised.value.do
    with pytest.raises(UserError, match="a new or an empty folder"):
        merge([one], tmp_path / "b", Monitor())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "d"]
    merge([one], tmp_path / "c", Monitor())
    with pytest.raises(UserError, match="made_by: expected None, found merge"):
        record_table(tmp_path / "c", samples_of_lengths([20, 9]))


def test_a_merged_store_has_the_template_arguments_of_all(tmp_path: Path) -> None:
    modes = {"enable_thinking": True}, {"enable_thinking": False}
    stores = []
    for name, mode in zip("ab", modes, strict=True):
        table = SampleTable.of(samples_of_lengths([9, 10], name))
        table.modes = [mode]
        stores.append(record_table(tmp_path / name, table))
    merge(stores, tmp_path / "c", Monitor())
    assert Store.open(tmp_path / "c").manifest.template_arguments == list(modes)


def test_no_store_is_made_of_a_damaged_shard(tmp_path: Path) -> None:
    store = record_table(tmp_path / "a", samples_of_lengths([20, 9, 30]))
    shard = tmp_path / "a" / store.manifest.shards[1].file
    shard.write_bytes(shard.read_bytes()[:-1] + b"\1")
    damaged = Store.open(tmp_path / "a")
    with pytest.raises(UserError, match="damaged: expected SHA-256") as caught:
        merge([damaged], tmp_path / "b", Monitor())
    assert caught.value.where == str(shard)
    assert "only missing shards are computed" in caught.value.do
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_damaged_merged_store_is_merged_again(tmp_path: Path) -> None:
    one = record_table(tmp_path / "a", samples_of_lengths([20, 9]))
    merged = merge([one], tmp_path / "b", Monitor())
    copy = tmp_path / "b" / "shard-00000.safetensors"
    data = copy.read_bytes()
    copy.unlink()  # a link of the source's shard
    copy.write_bytes(data[:-1] + b"\1")
    with pytest.raises(UserError, match="SHA-256") as caught:
        Store.open(merged.folder).verify()
    assert "`draftlab store merge`" in caught.value.do


def test_no_store_is_merged_into_a_store(tmp_path: Path) -> None:
    one = record_table(tmp_path / "a", samples_of_lengths([20, 9], "a"))
    record_table(tmp_path / "b", samples_of_lengths([9], "b"))
    (tmp_path / "link").symlink_to("b")
    before = sorted(tmp_path.rglob("*"))
    for inside in ("a/sub", "b/deep/sub", "link/sub"):
        with pytest.raises(UserError, match="outside of all stores, found one inside") as caught:
            merge([one], tmp_path / inside, Monitor())
        assert caught.value.where == str(tmp_path / inside)
    assert sorted(tmp_path.rglob("*")) == before


def test_the_verbs_of_the_command_line(folder: Path) -> None:
    store = "runs/small/store"
    count = len(Store.open(folder / store))
    result = draftlab(folder, "inspect", store, "--verify")
    for words in ("checksums", "shards agree", "lengths", ", mean "):
        assert words in result.output

    result = draftlab(folder, "store", "merge", store, "--out", "c")
    assert f"c: {count} records" in result.output
    assert Store.open(folder / "c").ids == Store.open(folder / store).ids
    for arguments, words in (
        (("merge", store, "--out", "c"), "one with files"),
        (("merge", store, "--out", f"{store}/e"), "inside the store"),
        (("merge", "nowhere", "--out", "e"), "manifest.json"),
        (("merge", store, "--out", "s3://b/e"), "found the URL s3://b/e"),
    ):
        result = ran(folder, "store", *arguments, code=2)
        assert words in result.output
        assert not (folder / "e").exists()
