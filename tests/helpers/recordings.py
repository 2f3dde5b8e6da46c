"""Small recordings: a toy target, conversations, stores of them and the hashes of their files."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from draftlab.progress import Monitor
from draftlab.store.record import RecordSettings, RecordShards, record
from draftlab.store.sample_table import Sample
from draftlab.store.store import Store, StoreIdentity
from draftlab.target_model.loading import load_target
from draftlab.target_model.model import Target
from draftlab.target_model.settings import TargetSettings
from tests.helpers.toys import toy_target_folder

BOUNDARIES = (0, 2, 3)
_SETTINGS = {"dtype": "float32", "shard_tokens": 100, "batch_tokens": 96}


def small_target(folder: Path) -> Target:
    """Make and load a random target with 4 layers, 32 channels and 64 positions."""
    toy_target_folder(folder, layers=4, hidden=32, max_length=64)
    return load_target(TargetSettings(path=str(folder), device="cpu"))


def make_samples(count: int = 12, seed: int = 0) -> list[Sample]:
    """Make conversations of 8–40 tokens with one or two answers."""
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


def record_store(
    target: Target,
    folder: Path,
    samples: list[Sample] | None = None,
    monitor: Monitor | None = None,
    record_shards: RecordShards | None = None,
    **changes: object,
) -> Store:
    """Record samples (default: `make_samples()`) with small shards."""
    settings = RecordSettings(**(_SETTINGS | changes))
    return record(
        target,
        make_samples() if samples is None else samples,
        folder,
        settings,
        identity_of(target, settings.dtype),
        monitor=monitor or Monitor(),
        record_shards=record_shards,
    )


def fork_recorder(target: Target, folder: Path, pause: float = 0.0, **changes: object) -> int:
    """Fork a process that records with pauses (seconds) between batches, and return its id."""

    class SlowMonitor(Monitor):
        def progress(self, *_: object) -> None:
            time.sleep(pause)

    child = os.fork()
    if child:
        return child
    try:
        torch.set_num_threads(1)
        record_store(target, folder, monitor=SlowMonitor(), **changes)
        os._exit(0)
    except BaseException:
        os._exit(1)


def exit_codes(*children: int) -> list[int]:
    """Wait for processes to end."""
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def file_hashes(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


@contextmanager
def recorded_shapes(target: Target) -> Iterator[list[tuple[int, ...]]]:
    """Yield a list to which the shape of each forward pass's token ids is appended."""
    shapes: list[tuple[int, ...]] = []
    embeddings = target.model.get_input_embeddings()
    hook = embeddings.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape)))
    try:
        yield shapes
    finally:
        hook.remove()
