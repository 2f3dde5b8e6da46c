"""Features in 8 bits: what they cost in accuracy, on disk, and where channels are very unequal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draftlab.store.fp8 import E4M3, dequantise, quantise, relative_errors
from draftlab.store.record import RecordSettings, record
from draftlab.store.store import Store
from draftlab.target_model.model import Target, TargetSettings, load_target
from draftlab.train.batch.packing import pack, pinned
from tests.helpers.recordings import BOUNDARIES, Lines, contents, identity_of, make, make_samples
from tests.helpers.toys import toy_target_folder


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp("target")
    toy_target_folder(folder, layers=4, hidden=32, max_length=64)
    return load_target(TargetSettings(path=str(folder), device="cpu"))


def features(tokens: int, channels: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, channels, generator=torch.Generator().manual_seed(seed))


def test_codes_and_scales_give_the_features_back_within_three_bits_of_mantissa() -> None:
    exact = features(200, 96) * torch.logspace(-3, 3, 200)[:, None]
    found = quantise(exact, 3)
    assert (found.codes.dtype, found.scales.dtype) == (E4M3, torch.float32)
    assert found.scales.shape == (200, 3)
    back = dequantise(found.codes, found.scales)
    assert back.dtype == torch.bfloat16
    parts = exact.view(200, 3, 32)
    largest = parts.abs().amax(-1, keepdim=True)
    error = (back.float().view_as(parts) - parts).abs()
    # Half a step of e4m3 and half of bfloat16; below 2⁻⁶ of 448 the steps of e4m3 are even.
    bound = torch.maximum(parts.abs() * (2**-4 + 2**-8), largest / 448 * 2**-10 * 1.01)
    assert bool((error <= bound).all())
    # The largest channel of each token and boundary is met almost exactly.
    assert bool((error.gather(-1, parts.abs().argmax(-1, keepdim=True)) <= largest * 2**-8).all())


def test_massive_channels_leave_the_others_their_precision() -> None:
    exact = features(300, 64, seed=1)
    plain = quantise(exact, 1)
    massive = exact.clone()
    massive[:, [5, 40]] *= 1000
    found = quantise(massive, 1)
    error, square = (torch.tensor([float(v) for v in sums]) for sums in (found.error, found.square))
    by_channel = (error / square).sqrt()
    reference = (plain.error / plain.square).sqrt()
    assert float(by_channel.max()) < 0.045
    assert float(reference.max()) < 0.045
    # int8 at the same scales: everything but the two channels is rounded to zero.
    step = massive.abs().amax(-1, keepdim=True) / 127
    int8 = (massive / step).round() * step
    lost = ((int8 - massive).square().sum(0) / massive.square().sum(0)).sqrt()
    assert float(lost.median()) > 0.5


def test_zeros_and_tiny_and_not_finite_tokens() -> None:
    exact = torch.zeros(4, 8)
    exact[1] = 1e-42
    exact[2, 3] = float("nan")
    exact[3, :4] = torch.tensor([1.0, -2.0, 3.0, float("inf")])
    exact[3, 4:] = 1.0
    found = quantise(exact, 2)
    back = dequantise(found.codes, found.scales).float()
    assert bool(back.isfinite().all())
    assert bool((back[2] == 0).all())
    assert back[3].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert bool(found.error.isfinite().all())


def test_relative_errors_by_boundary() -> None:
    error = torch.tensor([0.0, 1.0, 4.0, 0.0], dtype=torch.float64)
    square = torch.tensor([100.0, 100.0, 100.0, 300.0], dtype=torch.float64)
    found = relative_errors(error, square, 2)
    assert found == [(pytest.approx(0.0707, abs=1e-4), 0.1), (0.1, 0.2)]


def test_a_store_in_fp8(target: Target, tmp_path: Path) -> None:
    exact = make(target, tmp_path / "exact")
    monitor = Lines()
    store = make(target, tmp_path / "fp8", monitor=monitor, dtype="fp8")
    store.verify()
    width = len(BOUNDARIES) * target.hidden_size
    for a, b in zip(exact, store, strict=True):
        assert b.features.dtype == b.last.dtype == torch.bfloat16
        wanted = quantise(a.features, len(BOUNDARIES))
        assert torch.equal(b.features, dequantise(wanted.codes, wanted.scales))
        assert torch.equal(b.last, a.last.bfloat16())
        assert torch.equal(b.argmax, a.argmax)
    # The errors in the manifest are those a reader finds.
    found = torch.cat([r.features.float() for r in store])
    true = torch.cat([r.features for r in exact])
    for low, boundary in zip(range(0, width, target.hidden_size), BOUNDARIES, strict=True):
        part = slice(low, low + target.hidden_size)
        error = float((found - true)[:, part].norm() / true[:, part].norm())
        line = next(line for line in monitor.lines if f"at boundary {boundary} (" in line)
        said = float(line.split("relative error ")[1].split("%")[0]) / 100
        assert said == pytest.approx(error, rel=0.01)
        assert 0.01 < said < 0.05
    size = sum(shard.bytes for shard in store.manifest.shards)
    data = store.manifest.counts.tokens * store.identity.token_bytes
    assert data < size < data + 1500 * len(store.manifest.shards)


def test_bytes_of_a_token_at_8b_shapes(target: Target) -> None:
    shapes = replace(identity_of(target), boundaries=(2, 16, 29), hidden_size=4096)
    assert replace(shapes, dtype="bfloat16").token_bytes == 4 * 4096 * 2 + 16
    assert replace(shapes, dtype="fp8").token_bytes == 3 * (4096 + 4) + 2 * 4096 + 16 < 20_600


def test_resumed_and_again_it_has_the_same_bytes(target: Target, tmp_path: Path) -> None:
    make(target, tmp_path, dtype="fp8")
    before = contents(tmp_path)
    (tmp_path / "shard-00001.safetensors").unlink()
    make(target, tmp_path, dtype="fp8")
    assert contents(tmp_path) == before
    assert Store.open(tmp_path).manifest.shards[0].fp8_errors


def test_a_store_without_features(target: Target, tmp_path: Path) -> None:
    """Heads of EAGLE's first generation read the last state alone."""
    identity = replace(identity_of(target, "fp8"), boundaries=())
    settings = RecordSettings(dtype="fp8", boundaries=())
    store = record(target, make_samples(3), tmp_path, settings, identity, monitor=Lines())
    assert store[0].features.shape == (store.lengths[0], 0)
    assert store.manifest.shards[0].fp8_errors == []


def test_codes_are_packed_as_the_features_they_stand_for(target: Target, tmp_path: Path) -> None:
    store = make(target, tmp_path / "fp8", dtype="fp8")
    everything = [*range(len(store))]
    rows, plain = [store.views(everything)], [[store[i] for i in everything]]
    assert all(record.features.dtype == E4M3 for record in rows[0])
    found, expected = (pack(of, sum(store.lengths) + 3, 3) for of in (rows, plain))
    assert found.scales is None
    assert torch.equal(found.features, expected.features)
    assert torch.equal(found.last, expected.last)


@pytest.mark.gpu
def test_codes_are_decoded_where_they_arrive(target: Target, tmp_path: Path) -> None:
    store = make(target, tmp_path / "fp8", dtype="fp8")
    rows = [store.views(range(len(store)))]
    length = sum(store.lengths)
    there = pack(rows, length, 3, room=pinned).to(torch.device("cuda"))
    here = pack(rows, length, 3)
    assert there.features.dtype == torch.bfloat16
    assert torch.equal(there.features.cpu(), here.features)
