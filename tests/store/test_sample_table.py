"""Samples in columns: the same samples, and an index on disk that is never stale."""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from draftlab.store import sample_table as module
from draftlab.store.sample_table import (
    NEVER,
    Sample,
    SampleTable,
    Selection,
    prediction_mask,
    read_index,
    write_index,
)
from tests.store.test_store import ragged_samples

EMPTY = Sample("empty", (), ())
MADE_OF = {"answers": "abc"}


def as_tuples(samples: object) -> list[Sample]:
    return [
        Sample(s.id, tuple(map(int, s.token_ids)), tuple(map(int, s.spans)), s.temperature)
        for s in samples
    ]


@settings(max_examples=40, deadline=None)
@given(ragged_samples())
def test_a_table_in_memory_and_an_index_on_disk_hold_the_samples(samples: list[Sample]) -> None:
    samples.insert(1, EMPTY)
    digest = hashlib.sha256()
    for s in samples:
        digest.update(f"{s.id!r} {s.temperature!r} {len(s.token_ids)}\n".encode())
        digest.update(np.array([s.token_ids, s.spans], dtype="<i4").tobytes())
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as name:
        patch.setattr(module, "PART_TOKENS", 30)
        folder, notes = Path(name) / "answers.index", ["dropped"]
        write_index(samples, folder, MADE_OF, notes)
        assert [p.name for p in Path(name).iterdir()] == ["answers.index"]
        assert read_index(folder, MADE_OF | {"answers": "def"}) is None
        stored = read_index(folder, MADE_OF)
        assert stored.notes == notes
        for table in (stored, SampleTable.of(samples)):
            assert as_tuples(table) == samples
            assert as_tuples(table[-2:]) == samples[-2:]
            assert (table.sha256, table.ids) == (digest.hexdigest(), [s.id for s in samples])
            for row, sample in enumerate(samples):
                labels = prediction_mask(torch.tensor(sample.spans)).nonzero().flatten().tolist()
                assert table.first_label[row] == (labels or [NEVER])[0]
                assert table.loss_tokens[row] == sum(span > 0 for span in sample.spans)
                bounds = (min(0, *sample.token_ids, 0), max(0, *sample.token_ids, 0))
                assert (table.lowest[row], table.highest[row]) == bounds
            rows = np.arange(len(samples))[::-2]
            assert as_tuples(Selection(table, rows, 5)) == [
                Sample(s.id, s.token_ids[:5], s.spans[:5], s.temperature) for s in samples[::-2]
            ]


@pytest.mark.parametrize("place", ["../other/{}", "{folder}/other/{}", "{}"])
def test_an_index_leads_nowhere_else(tmp_path: Path, place: str) -> None:
    """A stranger's run folder may name, or link to, a file of the user."""
    other, folder, file = tmp_path / "other", tmp_path / "i", "00000.safetensors"
    for path in (other, folder):
        write_index([Sample("a", (1, 2), (0, 1))], path, MADE_OF, [])
    (folder / file).unlink()
    if place == "{}":
        (folder / file).symlink_to(other / file)
    index = json.loads((folder / "index.json").read_text())
    index["files"] = {place.format(file, folder=tmp_path): index["files"][file]}
    (folder / "index.json").write_text(json.dumps(index))
    assert read_index(other, MADE_OF) is not None
    assert read_index(folder, MADE_OF) is None


def test_a_damaged_or_interrupted_index_is_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "i"
    write_index([Sample("a", (1, 2), (0, 1))], folder, MADE_OF, [])
    file = folder / "00000.safetensors"
    data = file.read_bytes()
    for damaged in (data[:-1], data[:-1] + bytes([data[-1] ^ 1]), b""):
        file.write_bytes(damaged)
        assert read_index(folder, MADE_OF) is None
    file.unlink()
    assert read_index(folder, MADE_OF) is None

    def interrupted():
        yield Sample("b", (1, 2), (0, 1))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_index(interrupted(), folder, MADE_OF, [])
    assert read_index(folder, MADE_OF) is None
    write_index([EMPTY], folder, MADE_OF, [])
    assert as_tuples(read_index(folder, MADE_OF)) == [EMPTY]
    assert [p.name for p in tmp_path.iterdir()] == ["i"]
