"""Decoding on a CPU: a small target has one thread, and torch's number returns."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from draftlab.engine.engine import SMALL_TARGET_BYTES, decoding_threads, one_thread

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_one_thread_inside_the_block_only() -> None:
    with one_thread(CPU):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(("more", "threads"), [(0, 1), (1, 2)])
def test_a_small_target_decodes_with_one_thread(more: int, threads: int) -> None:
    weights = torch.empty(SMALL_TARGET_BYTES + more, dtype=torch.int8, device="meta")
    target = SimpleNamespace(device=CPU, model=SimpleNamespace(parameters=lambda: [weights]))
    with decoding_threads(target):
        assert torch.get_num_threads() == threads
    assert torch.get_num_threads() == 2
