"""Stores made of stores: nothing lost, nothing twice, the same bits; and what a store holds."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draftlab.errors import UserError
from draftlab.pipeline.store_statistics import histogram, survey
from draftlab.progress import Monitor
from draftlab.store.merge_split_sample import merge, select
from draftlab.store.store import Sample, Store
from tests.helpers.small_run import copy_of_finished, draftlab
from tests.store.test_store import make, plain


def named(prefix: str, lengths: list[int]) -> list[Sample]:
    return [replace(s, id=f"{prefix}{s.id}", temperature=0.5) for s in plain(lengths)]


def same(one: Store, number: int, other: Store, index: int) -> bool:
    a, b = one.stored(number), other.stored(index)
    assert a.keys() == b.keys()
    equal = (torch.equal(a[n].view(torch.uint8), b[n].view(torch.uint8)) for n in a)
    return all(equal) and one.temperature(number) == other.temperature(index)


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_merged_records_are_those_of_the_parts(tmp_path: Path, dtype: str) -> None:
    one = make(tmp_path / "a", named("a", [20, 9, 30]), dtype=dtype)
    two = make(tmp_path / "b", named("b", [5, 25]), dtype=dtype)
    merged = merge([one, two], tmp_path / "c", Monitor())
    merged.verify()
    assert merged.ids == [*one.ids, *two.ids]
    assert merged.lengths == [20, 9, 30, 5, 25]
    for index in range(5):
        source, number = (one, index) if index < 3 else (two, index - 3)
        assert same(source, number, merged, index)
    counts = merged.manifest.counts
    assert (counts.records, counts.tokens) == (5, 89)
    files = [tmp_path / "a" / one.manifest.shards[0].file, tmp_path / "c/shard-00000.safetensors"]
    assert len({os.stat(file).st_ino for file in files}) == 1
    # The parts may go, the merged store stays.
    for path in (tmp_path / "a").iterdir():
        path.unlink()
    Store.open(tmp_path / "c").verify()


def test_what_cannot_be_merged(tmp_path: Path) -> None:
    one, two = make(tmp_path / "a", plain([20, 9])), make(tmp_path / "b", plain([9]))
    with pytest.raises(UserError, match="every record in one store, found 's0'"):
        merge([one, two], tmp_path / "c", Monitor())
    other = make(tmp_path / "d", named("d", [9]), dtype="bfloat16")
    with pytest.raises(UserError, match="dtype: expected float32, found bfloat16"):
        merge([one, other], tmp_path / "c", Monitor())
    with pytest.raises(UserError, match="a new folder"):
        merge([one], tmp_path / "b", Monitor())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "d"]


def test_recording_into_a_merged_store_is_refused(tmp_path: Path) -> None:
    merge([make(tmp_path / "a", plain([20]))], tmp_path / "c", Monitor())
    with pytest.raises(UserError, match="made_by: expected None, found merge"):
        make(tmp_path / "c", plain([20]))


def test_selected_records_are_copied_bit_for_bit(tmp_path: Path) -> None:
    store = make(tmp_path / "a", named("a", [20, 9, 30, 12, 8]), dtype="fp8")
    chosen = [4, 0, 3]
    made = {"made_by": "test"}
    part = select(store, chosen, tmp_path / "b", made, Monitor(), shard_tokens=25)
    part.verify()
    assert part.ids == [store.ids[i] for i in chosen]
    assert [len(shard.ids) for shard in part.manifest.shards] == [1, 1, 1]
    assert all(same(store, i, part, number) for number, i in enumerate(chosen))
    assert torch.equal(part[1].features, store[0].features)
    assert part.manifest.counts.loss_tokens == sum(int((store[i].spans > 0).sum()) for i in chosen)
    with pytest.raises(UserError, match="found none"):
        select(store, [], tmp_path / "c", made, Monitor())


def test_a_rewriting_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make(tmp_path / "a", plain([20, 9]))
    monkeypatch.setattr("draftlab.store.merge_split_sample.sha256_file", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        select(store, [1], tmp_path / "b", {}, Monitor())
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_survey_counts_what_is_there(tmp_path: Path) -> None:
    samples = [
        Sample("a", (1, 2, 3, 3, 3), (0, 1, 1, 1, 1)),
        Sample("b", (4,) * 40, (0,) * 38 + (1, 1)),
    ]
    found = survey(make(tmp_path, samples))
    # Predicted: all but an answer's first token.
    assert (found.predicted, found.kinds) == (4, 2)
    assert found.coverage == {2: 1.0}
    assert found.lengths == [(16, 1), (32, 0), (64, 1)]
    assert histogram([16, 17, 4096]) == [(2**i, int(i in (4, 5, 12))) for i in range(4, 13)]


def test_from_the_command_line(tmp_path: Path) -> None:
    copy_of_finished(tmp_path)
    store = "runs/small/store"
    count = len(Store.open(tmp_path / store))
    result = draftlab(tmp_path, "inspect", store, "--verify")
    assert "checksums" in result.output
    assert "shards agree" in result.output
    assert "≤ 64" in result.output
    assert "covers" in result.output

    split = ("store", "split", store, "--out", "a", "--out", "b", "--shares")
    assert draftlab(tmp_path, *split, "75,25").exit_code == 0
    assert len(Store.open(tmp_path / "a")) + len(Store.open(tmp_path / "b")) == count
    result = draftlab(tmp_path, "store", "merge", "a", "b", "--out", "c")
    assert f"c: {count} records" in result.output
    assert sorted(Store.open(tmp_path / "c").ids) == sorted(Store.open(tmp_path / store).ids)
    assert draftlab(tmp_path, "store", "sample", "c", "--out", "d", "--records", "2").exit_code == 0
    assert len(Store.open(tmp_path / "d")) == 2

    for arguments, words in (
        (("store", "split", store, "--out", "e"), "a folder for each part, found 1"),
        (("store", "split", store, "--out", "e", "--out", "a"), "one with files"),
        ((*split[:-1], "--shares", "1,x"), "2 positive shares"),
        (("store", "split", store, *2 * ("--out", "e")), "found one twice"),
        (
            ("store", "split", store, "--out", "e", "--out", "f", "--shares", "999,1"),
            f"none of {count} for f",
        ),
        (("store", "sample", "c", "--out", "e", "--records", "999"), "at most the store's"),
        (("store", "merge", "nowhere", "--out", "e"), "manifest.json"),
    ):
        result = draftlab(tmp_path, *arguments)
        assert result.exit_code == 2
        assert words in result.output
        assert not (tmp_path / "e").exists()

    shard = next((tmp_path / store).glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    result = draftlab(tmp_path, "inspect", store, "--verify")
    assert result.exit_code == 2
    assert "SHA-256" in result.output
    assert shard.name in result.output
