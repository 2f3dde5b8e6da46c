"""Small recordings for tests: a toy target's conversations, and what a store's folder holds."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np

from draftlab.progress import Monitor
from draftlab.store.record import RecordSettings, record
from draftlab.store.store import Sample, Store, StoreIdentity
from draftlab.target_model.model import Target

BOUNDARIES = (0, 2, 3)


class Lines(Monitor):
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.steps: list[tuple[float, float]] = []

    def say(self, line: str) -> None:
        self.lines.append(line)

    def progress(self, stage: str, done: float, total: float, detail: str = "") -> None:
        self.steps.append((done, total))


def make_samples(count: int = 12, seed: int = 0) -> list[Sample]:
    """Conversations of 8–40 tokens with one or two answers."""
    generator = np.random.default_rng(seed)
    samples = []
    for i in range(count):
        length = int(generator.integers(8, 41))
        spans = [0] * length
        spans[3 : length // 2] = [1] * (length // 2 - 3)
        if i % 2:
            spans[-3:] = [2] * 3
        ids = tuple(generator.integers(0, 280, length).tolist())
        samples.append(Sample(f"c{i}", ids, tuple(spans), [None, 0.0, 0.8][i % 3]))
    return samples


def identity_of(target: Target, dtype: str = "float32", **changes: object) -> StoreIdentity:
    identity = StoreIdentity.of(
        target, tokenizer_sha256="tok", template_sha256="tpl", boundaries=BOUNDARIES, dtype=dtype
    )
    return replace(identity, **changes)


def make(
    target: Target,
    folder: Path,
    samples: list[Sample] | None = None,
    monitor: Monitor | None = None,
    **changes: object,
) -> Store:
    settings = RecordSettings(
        **({"dtype": "float32", "shard_tokens": 100, "batch_tokens": 96} | changes)
    )
    return record(
        target,
        make_samples() if samples is None else samples,
        folder,
        settings,
        identity_of(target, settings.dtype),
        monitor=monitor or Monitor(),
    )


def contents(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}
