"""Features in 8 bits: their accuracy, also with massive activations, their size and decoding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from draftlab.progress import Monitor
from draftlab.store.fp8 import E4M3, dequantise, quantise
from draftlab.store.record import RecordSettings, record
from draftlab.target_model.model import Target
from draftlab.train.batch.packing import map_tensors, pack
from tests.helpers.monitors import RecordingMonitor
from tests.helpers.recordings import BOUNDARIES, identity_of, make_samples, record_store


def random_features(tokens: int, channels: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, channels, generator=torch.Generator().manual_seed(seed))


def test_dequantised_features_are_exact_to_three_bits_of_mantissa() -> None:
    exact = random_features(200, 96) * torch.logspace(-3, 3, 200)[:, None]
    quantised = quantise(exact, 3)
    assert (quantised["features"].dtype, quantised["scales"].dtype) == (E4M3, torch.float32)
    assert quantised["scales"].shape == (200, 3)
    decoded = dequantise(quantised["features"], quantised["scales"])
    assert decoded.dtype == torch.bfloat16
    by_boundary = exact.view(200, 3, 32)
    largest = by_boundary.abs().amax(-1, keepdim=True)
    error = (decoded.float().view_as(by_boundary) - by_boundary).abs()
    # Half a step of e4m3 and half of bfloat16; below 2⁻⁶ of 448 the steps of e4m3 are even.
    bound = torch.maximum(by_boundary.abs() * (2**-4 + 2**-8), largest / 448 * 2**-10 * 1.01)
    assert bool((error <= bound).all())
    # The largest channel of each token and boundary is almost exact.
    argmax = by_boundary.abs().argmax(-1, keepdim=True)
    assert bool((error.gather(-1, argmax) <= largest * 2**-8).all())


def test_other_channels_stay_precise_beside_massive_activations() -> None:
    exact = random_features(300, 64, seed=1)
    massive = exact.clone()
    massive[:, [5, 40]] *= 1000
    for features in (exact, massive):
        quantised = quantise(features, 1)
        error, square = (sums.float() for sums in (quantised["error"], quantised["square"]))
        assert float((error / square).sqrt().max()) < 0.045


def test_zeros_and_tiny_tokens() -> None:
    exact = torch.zeros(2, 8)
    exact[1] = 1e-42
    quantised = quantise(exact, 2)
    decoded = dequantise(quantised["features"], quantised["scales"]).float()
    assert bool((decoded == 0).all())
    assert bool(quantised["error"].isfinite().all())


def test_a_store_in_fp8(target: Target, tmp_path: Path) -> None:
    exact = record_store(target, tmp_path / "exact")
    monitor = RecordingMonitor()
    store = record_store(target, tmp_path / "fp8", monitor=monitor, dtype="fp8")
    store.verify()
    width = len(BOUNDARIES) * target.hidden_size
    for a, b in zip(exact, store, strict=True):
        assert b.features.dtype == b.last.dtype == torch.bfloat16
        expected = quantise(a.features, len(BOUNDARIES))
        assert torch.equal(b.features, dequantise(expected["features"], expected["scales"]))
        assert torch.equal(b.last, a.last.bfloat16())
        assert torch.equal(b.argmax, a.argmax)
    # The reported errors are those of the features as read.
    decoded = torch.cat([r.features.float() for r in store])
    features = torch.cat([r.features for r in exact])
    for low, boundary in zip(range(0, width, target.hidden_size), BOUNDARIES, strict=True):
        channels = slice(low, low + target.hidden_size)
        error = float((decoded - features)[:, channels].norm() / features[:, channels].norm())
        line = next(line for line in monitor.lines if f"at boundary {boundary} (" in line)
        reported = float(line.split("relative error ")[1].split("%")[0]) / 100
        assert reported == pytest.approx(error, rel=0.01)
        assert 0.01 < reported < 0.05
    size = sum(shard.bytes for shard in store.manifest.shards)
    data = store.manifest.counts.tokens * store.identity.bytes_per_token
    assert data < size < data + 1500 * len(store.manifest.shards)


def test_a_store_without_features(target: Target, tmp_path: Path) -> None:
    """Heads of EAGLE's first generation read the last state only."""
    identity = replace(identity_of(target, "fp8"), boundaries=())
    settings = RecordSettings(dtype="fp8", boundaries=())
    store = record(target, make_samples(3), tmp_path, settings, identity, monitor=Monitor())
    assert store[0].features.shape == (store.lengths[0], 0)
    assert store.manifest.shards[0].fp8_errors == []


def test_packed_codes_decode_to_the_packed_features(target: Target, tmp_path: Path) -> None:
    store = record_store(target, tmp_path / "fp8", dtype="fp8")
    indices = range(len(store))
    views, records = store.views(indices), [store[i] for i in indices]
    assert all(record.features.dtype == E4M3 for record in views)
    length = sum(store.lengths) + 3
    batch, expected = (pack([rows], length, 3).dequantised() for rows in (views, records))
    assert batch.scales is None
    assert torch.equal(batch.features, expected.features)
    assert torch.equal(batch.last, expected.last)


@pytest.mark.gpu
def test_codes_are_decoded_on_the_gpu(target: Target, tmp_path: Path) -> None:
    store = record_store(target, tmp_path / "fp8", dtype="fp8")
    batch = pack([store.views(range(len(store)))], sum(store.lengths), 3)
    on_gpu = map_tensors(batch, Tensor.pin_memory).to(torch.device("cuda"))
    assert on_gpu.features.dtype == torch.bfloat16
    assert torch.equal(on_gpu.features.cpu(), batch.dequantised().features)
