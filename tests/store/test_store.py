"""The store: ragged records come back as they went in; foreign, cut and unfinished ones do not."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from draftlab.errors import UserError
from draftlab.progress import Monitor
from draftlab.store.record import RecordSettings, record
from draftlab.store.store import Sample, Store, StoreIdentity, predicted, teachers
from draftlab.target_model.model import States
from draftlab.target_model.packed_rows import Documents
from draftlab.train.batch.loss_rows import loss_reach

VOCAB, WIDTH, BOUNDARIES = 50, 4, (1, 3)


class TableTarget:
    """Has the face of a Target; its states are a known function of token and position."""

    num_layers, hidden_size, vocab_size, max_length = 6, WIDTH, VOCAB, 1000
    name, fingerprint, folder = "table", "f" * 64, Path("table")
    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, why_padded: str | None = None) -> None:
        self.why_padded = why_padded

    def states(
        self, ids: torch.Tensor, boundaries: tuple[int, ...], documents: Documents | None = None
    ) -> States:
        assert (documents is None) == (self.why_padded is not None)
        positions = torch.arange(ids.shape[-1]) if documents is None else documents.positions
        features = [self.at(ids, b, positions) for b in boundaries]
        return States(torch.cat(features, -1), self.at(ids, self.num_layers, positions))

    def at(
        self, ids: torch.Tensor, boundary: int, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        positions = torch.arange(ids.shape[-1]) if positions is None else positions
        positions = positions.expand_as(ids)
        units = torch.arange(WIDTH)
        return (ids * 3 + positions * 7 + boundary * 11)[..., None].float() / 16 + units

    def logits(self, last: torch.Tensor) -> torch.Tensor:
        return torch.sin(last[..., :1] * torch.arange(1, VOCAB + 1))


TARGET: Any = TableTarget()
SETTINGS = RecordSettings(dtype="float32", shard_tokens=30, batch_tokens=25)
IDENTITY = StoreIdentity.of(
    TARGET, tokenizer_sha256="tok", template_sha256="tpl", boundaries=BOUNDARIES, dtype="float32"
)


def make(folder: Path, samples: list[Sample], target: Any = TARGET, **settings: Any) -> Store:
    mine = SETTINGS.model_copy(update=settings)
    identity = replace(IDENTITY, dtype=mine.dtype)
    return record(target, samples, folder, mine, identity, monitor=Monitor())


def plain(lengths: list[int]) -> list[Sample]:
    return [
        Sample(f"s{i}", tuple((i + t) % VOCAB for t in range(n)), (0,) + (1,) * (n - 1))
        for i, n in enumerate(lengths)
    ]


@st.composite
def ragged(draw: st.DrawFn) -> list[Sample]:
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
    ragged(),
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
        make(folder, samples, target, **sizes, dtype=dtype)
        store = Store.open(folder, replace(IDENTITY, dtype=dtype))
        store.verify()
        assert store.ids == [s.id for s in samples]
        assert store.lengths == [len(s.token_ids) for s in samples]
        for shard in store.manifest.shards:
            assert shard.tokens <= shard_tokens or len(shard.ids) == 1
            assert sorted(i for b in shard.batches for i in b) == list(range(len(shard.ids)))
            for batch in shard.batches:
                mine = [shard.lengths[i] for i in batch]
                tokens = len(mine) * max(mine) if padded else sum(mine)
                assert tokens <= batch_tokens or len(batch) == 1
        # Backwards, so that no record leans on the one before it.
        for i in reversed(range(len(store))):
            sample, got = samples[i], store[i]
            ids = torch.tensor(sample.token_ids)
            assert torch.equal(got.tokens, ids)
            assert torch.equal(got.spans, torch.tensor(sample.spans))
            assert got.temperature == sample.temperature
            wide = torch.cat([TARGET.at(ids, b) for b in BOUNDARIES], -1)
            assert torch.equal(got.features, wide.to(got.features.dtype))
            last = TARGET.at(ids, TARGET.num_layers)
            assert torch.equal(got.last, last.to(got.last.dtype))
            logits, taught = TARGET.logits(last), teachers(got.spans)
            torch.testing.assert_close(got.logsumexp[taught], logits.logsumexp(-1)[taught])
            assert torch.equal(got.argmax[taught], logits.argmax(-1)[taught])
            tokens, spans = store.tokens_and_spans(i)
            assert torch.equal(tokens, got.tokens)
            assert torch.equal(spans, got.spans)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30))
def test_predicted_is_what_the_steps_of_an_unroll_predict(spans: list[int]) -> None:
    reach = loss_reach(torch.tensor(spans)).tolist()
    asked = {t + 2 + k for t in range(len(spans)) for k in range(reach[t])}
    assert set(predicted(torch.tensor(spans)).nonzero().flatten().tolist()) == asked


def test_indexing_like_a_sequence(tmp_path: Path) -> None:
    store = make(tmp_path, plain([5, 6, 7]))
    assert len(store) == 3
    assert [r.id for r in store] == ["s0", "s1", "s2"]
    assert store[-1].id == "s2"
    for index in (3, -4):
        with pytest.raises(IndexError):
            store[index]


def test_a_record_may_be_changed_in_place(tmp_path: Path) -> None:
    store = make(tmp_path, plain([5, 6]))
    before = store[0].features.clone()
    store[0].features.zero_()
    assert torch.equal(store[0].features, before)
    store.verify()


def test_shards_are_opened_on_demand_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, plain([20] * 5))
    opened: list[str] = []
    monkeypatch.setattr(
        "draftlab.store.store.safe_open",
        lambda path, kind: opened.append(Path(path).name) or safe_open(path, kind),
    )
    store = Store.open(tmp_path)
    assert opened == []
    for i in (3, 3, 1, 3):
        _ = store[i]
    assert opened == ["shard-00003.safetensors", "shard-00001.safetensors"]


def test_layout_is_the_documented_one(tmp_path: Path) -> None:
    make(tmp_path, plain([5, 6]), dtype="bfloat16")
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "manifest.json",
        "shard-00000.safetensors",
    ]
    with safe_open(tmp_path / "shard-00000.safetensors", "pt") as shard:
        slices = {name: shard.get_slice(name) for name in shard.keys()}  # noqa: SIM118
        kinds = {name: (s.get_dtype(), s.get_shape()) for name, s in slices.items()}
    assert kinds == {
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


OTHERS = {
    "target_fingerprint": "0" * 64,
    "tokenizer_sha256": "other-tokenizer",
    "template_sha256": "other-template",
    "boundaries": (2, 3),
    "num_layers": 7,
    "hidden_size": 8,
    "vocab_size": 51,
    "dtype": "bfloat16",
}


@pytest.mark.parametrize("key", OTHERS)
def test_another_identity_is_refused_with_both_values(tmp_path: Path, key: str) -> None:
    assert {*OTHERS, "target_name"} == {f.name for f in fields(StoreIdentity)}
    make(tmp_path, plain([5]))
    with pytest.raises(UserError) as caught:
        Store.open(tmp_path, replace(IDENTITY, **{key: OTHERS[key]}))
    mine, theirs = getattr(IDENTITY, key), OTHERS[key]
    shown = [str(list(v) if isinstance(v, tuple) else v) for v in (theirs, mine)]
    assert f"{key}: expected {shown[0]}, found {shown[1]}" in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_renamed_target_is_the_same_target(tmp_path: Path) -> None:
    make(tmp_path, plain([5]))
    Store.open(tmp_path, replace(IDENTITY, target_name="moved"))


@pytest.mark.parametrize("name", ["/data/models/mine", "./models/mine", "~/mine"])
def test_a_local_target_is_named_without_its_place(name: str) -> None:
    target: Any = SimpleNamespace(
        **{
            k: getattr(TARGET, k)
            for k in ("fingerprint", "num_layers", "hidden_size", "vocab_size")
        },
        name=name,
        folder=Path("/data/models/mine"),
    )
    identity = StoreIdentity.of(
        target, tokenizer_sha256="", template_sha256="", boundaries=(1,), dtype="float32"
    )
    assert identity.target_name == "mine"


def test_no_store(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"store's manifest\.json, found nothing"):
        Store.open(tmp_path)


def edited(folder: Path, **changes: Any) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"complete": False}, "interrupted"),
        ({"schema": 99}, "schema 1, found 99"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_a_manifest_that_does_not_fit(tmp_path: Path, changes: dict, words: str) -> None:
    make(tmp_path, plain([5]))
    edited(tmp_path, **changes)
    with pytest.raises(UserError, match=words):
        Store.open(tmp_path)


def test_shards_that_are_missing_cut_or_swapped(tmp_path: Path) -> None:
    make(tmp_path, plain([20, 20, 20]))
    first, second = (tmp_path / f"shard-0000{i}.safetensors" for i in (0, 1))
    good = second.read_bytes()
    os.truncate(second, len(good) - 1)
    with pytest.raises(UserError, match=f"{len(good)} bytes, found {len(good) - 1}") as caught:
        Store.open(tmp_path)
    assert "shard-00001" in caught.value.where

    second.write_bytes(b"\xff" * len(good))
    store = Store.open(tmp_path)
    _ = store[0]
    with pytest.raises(UserError, match="corrupt") as caught:
        _ = store[1]
    assert "shard-00001" in caught.value.where

    second.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(UserError, match="SHA-256") as caught:
        Store.open(tmp_path).verify()
    assert "shard-00001" in caught.value.where

    second.unlink()
    with pytest.raises(UserError, match="missing") as caught:
        Store.open(tmp_path)
    assert "shard-00001" in caught.value.where
    second.write_bytes(good)
    Store.open(tmp_path).verify()
    assert first.exists()


def test_a_shard_of_another_store_of_the_same_size(tmp_path: Path) -> None:
    make(tmp_path / "a", plain([8, 12]))
    make(tmp_path / "b", plain([12, 8]))
    name = "shard-00000.safetensors"
    (tmp_path / "a" / name).write_bytes((tmp_path / "b" / name).read_bytes())
    with pytest.raises(UserError, match="another store"):
        _ = Store.open(tmp_path / "a")[0]
