"""The memory in training's lines is what training needed, not what came before it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draftlab.train import loop
from draftlab.train.metrics import peak_memory, reset_peak_memory
from tests.helpers.list_store import ListStore
from tests.helpers.toy_training import orthogonal_parts, toy_answer, trained


class Counters:
    """A stand-in for torch.cuda's counters of allocated bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.peak = 0
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.peak)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)

    def reset(self, device: torch.device) -> None:
        self.peak = self.now

    def allocate(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)


def test_the_answers_cache_is_no_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    counters, device = Counters(monkeypatch), torch.device("cuda")
    for size in (75, -75, 5):
        counters.allocate(size)
    assert peak_memory(device) == 75
    reset_peak_memory(device)
    assert peak_memory(device) == 5
    for size in (17, -10):
        counters.allocate(size)
    assert peak_memory(device) == 22


def test_training_counts_from_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[torch.device] = []
    monkeypatch.setattr(loop, "reset_peak_memory", devices.append)
    target = orthogonal_parts()
    store = ListStore([toy_answer(target, i) for i in range(8)])
    trained(tmp_path, store, target, steps=1)
    assert [device.type for device in devices] == ["cpu"]
