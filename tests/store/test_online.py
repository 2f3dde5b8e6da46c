"""An online store computes the records that a recording stores."""

from __future__ import annotations

import threading
import time
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from draftlab.store.store import Record
from draftlab.target_model.model import Target
from draftlab.text.draft_vocabulary import build_draft_vocabulary
from tests.helpers.recordings import make_samples, online_store, record_store
from tests.helpers.small_run import contents, draftlab, new_workshop


def assert_same(record: Record, expected: Record, tolerance: float = 0.0) -> None:
    for field in fields(Record):
        a, b = getattr(record, field.name), getattr(expected, field.name)
        if isinstance(b, torch.Tensor):
            assert a.dtype == b.dtype, field.name
            torch.testing.assert_close(
                a, b, equal_nan=True, msg=field.name, rtol=tolerance, atol=tolerance
            )
        else:
            assert a == b, field.name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8"])
def test_with_a_pass_per_sample_the_bits_are_equal(
    dtype: str, target: Target, tmp_path: Path
) -> None:
    settings = {"dtype": dtype, "batch_tokens": 1, "max_length": 30}
    stored = record_store(target, tmp_path, **settings)
    online = online_store(target, make_samples(), **settings)
    assert (online.ids, online.lengths) == (stored.ids, stored.lengths)
    assert max(online.lengths) == 30
    assert (online.on_disk, stored.on_disk) == (False, True)
    for index in [3, 0, 11]:
        assert_same(online[index], stored[index])
        assert_same(online.view(index), stored.view(index))
        pairs = zip(online.tokens_and_spans(index), stored.tokens_and_spans(index), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    one, two = (
        build_draft_vocabulary(store, 50, (), (), target.vocab_size) for store in (online, stored)
    )
    assert torch.equal(one.target_ids, two.target_ids)


def test_records_that_are_read_together_share_passes(target: Target, tmp_path: Path) -> None:
    stored, online = record_store(target, tmp_path), online_store(target, make_samples())
    passes: list[tuple[int, ...]] = []
    hook = target.layers[0].register_forward_pre_hook(
        lambda _, args: passes.append(tuple(args[0].shape[:2]))
    )
    indices = [7, 2, 9, 4, 0]
    records = online.views(indices)
    hook.remove()
    assert 1 < len(passes) < len(indices)
    assert all(rows * width <= 96 for rows, width in passes)
    for index, record in zip(indices, records, strict=True):
        assert_same(record, stored.view(index), 1e-5)


def test_passes_of_several_threads_are_separate(target: Target) -> None:
    online = online_store(target, make_samples(), batch_tokens=1)
    expected = online.views(range(12))
    results: dict[int, list[Record]] = {}

    def read(number: int) -> None:
        results[number] = online.views([(number + i) % 12 for i in range(12)])

    # A pause in the middle of each pass, in which another thread could begin its own.
    hook = target.layers[1].register_forward_pre_hook(lambda *_: time.sleep(1e-3))
    threads = [threading.Thread(target=read, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    hook.remove()
    assert len(results) == 4
    for number, records in results.items():
        for i, record in enumerate(records):
            assert_same(record, expected[(number + i) % 12])


def test_training_online_ends_with_the_bits_of_training_from_a_store(tmp_path: Path) -> None:
    workshop = new_workshop(tmp_path)
    settings = ("record.batch_tokens=1", "record.dtype=float32", "train.validate_every=3")
    train = ("train", "small.yaml", *settings)
    runs = {}
    for name, online in {"stored": "false", "online": "true"}.items():
        result = draftlab(workshop, *train, f"name={name}", f"record.online={online}")
        assert result.exit_code == 0, result.output
        runs[name] = contents(workshop / "runs" / name)
    weights = "head/model.safetensors"
    assert runs["online"][weights] == runs["stored"][weights]
    store_files = {
        run: [name for name in files if name.startswith("store/")] for run, files in runs.items()
    }
    assert store_files["online"] == ["store/manifest.json", "store/records.safetensors"]
    assert len(store_files["stored"]) > 1
    again = draftlab(workshop, *train, "name=online", "record.online=true")
    assert again.exit_code == 0
    assert "store: there" in again.output
    assert contents(workshop / "runs" / "online") == runs["online"]
    other = draftlab(workshop, "record", "small.yaml", "name=online", *settings)
    assert other.exit_code == 2
    assert "record.online: True in the run, False now" in other.output
    inspected = draftlab(workshop, "inspect", "runs/online/store")
    assert inspected.exit_code == 2
    assert "this store holds no states" in inspected.output
