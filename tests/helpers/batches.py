"""Packers of toy answers, and the comparison of batches to the bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftlab.train.batch.loss_rows import StepSampling
from draftlab.train.batch.packing import Batch, OptimizerStep, Packer, Rows, map_tensors
from draftlab.train.settings import TrainSettings
from tests.helpers.list_store import ListStore
from tests.helpers.toy_training import orthogonal_parts, toy_answer


def toy_store(count: int = 12) -> ListStore:
    target = orthogonal_parts()
    return ListStore([toy_answer(target, number) for number in range(count)])


def packer(
    store: Any = None,
    *,
    sampling: StepSampling | None = None,
    imitates_states: bool = False,
    one_row: bool = True,
    **settings: Any,
) -> Packer:
    """Make a packer for four rows of 64 positions and three steps."""
    fields = {"row_tokens": 64, "batch_rows": 4, "ttt_steps": 3} | settings
    validated = TrainSettings.model_validate(fields)
    return Packer(store or toy_store(), validated, 7, sampling, imitates_states, one_row)


def step(number: int = 3, micro_batches: list[tuple[Rows, bool]] | None = None) -> OptimizerStep:
    """Make a step of two micro-batches of three records, and an idle one."""
    rows = [([[first, first + 1], [first + 2]], False) for first in range(2)]
    return OptimizerStep(number, micro_batches or [*rows, ([[0]], True)])


def all_tensors(batch: Batch) -> list[Tensor]:
    """Return the tensors of a batch that go to the device."""
    tensors: list[Tensor] = []
    map_tensors(batch, lambda t: tensors.append(t) or t)
    return tensors


def assert_same_batches(actual: list[Batch], expected: list[Batch]) -> None:
    """Check that batches have equal bits, shapes, dtypes and numbers."""
    assert len(actual) == len(expected) > 0
    for one, other in zip(actual, expected, strict=True):
        assert _contents(one) == _contents(other)


def _contents(batch: Batch) -> list[Any]:
    tensors = [*all_tensors(batch), *(plan.host for plan in batch.plans)]
    plain = [t.cpu().flatten().clone(memory_format=torch.contiguous_format) for t in tensors]
    bits = [t.view(torch.uint8).tolist() for t in plain]
    numbers = [batch.num_records, batch.num_tokens, batch.idle, batch.counts]
    return [*((t.dtype, t.shape, b) for t, b in zip(tensors, bits, strict=True)), *numbers]
