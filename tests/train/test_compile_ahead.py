"""A step's kernels are compiled before its first pass, which leaves no trace in the module."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from draftlab.kernels import compile_ahead
from draftlab.train.batch.packing import Batch, pack
from draftlab.train.distributed import backends
from draftlab.train.objectives import loss as loss_module
from tests.helpers.gpu import assert_same, kernels_compiled_ahead
from tests.helpers.synthetic import EAGLE
from tests.train.test_step_graph import (
    POSITIONS,
    STEPS,
    WEIGHTS,
    conversations,
    module_of,
    run,
    sizes_of,
)

FAMILIES: list[dict[str, object]] = [
    {"num_layers": 2, "qk_norm": True},
    {"family": "peagle", "num_layers": 2},
    {"family": "dspark"},
    {"family": "dflash2"},
    EAGLE,
]


def batch_of(*, padded: bool) -> Batch:
    batches = [conversations(seed) for seed in (1, 2)]
    sizes = sizes_of(batches, 10**6) if padded else None
    batch = pack([batches[0]], POSITIONS, STEPS, one_row=True, sizes=sizes)
    assert (batch.padding is not None) == padded
    return batch


@pytest.mark.parametrize("loss", ["soft_ce", "lk"])
@pytest.mark.parametrize("head", FAMILIES, ids=str)
def test_a_pass_needs_no_values(
    head: dict[str, object], loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where lk reads a part of the teachers, and where batches are padded."""
    passes: list[int] = []

    def compile_kernels(device: torch.device) -> Any:
        return lambda work: passes.append(compile_ahead._compile(work))

    monkeypatch.setattr(backends, "CompileAhead", compile_kernels)
    for padded in (False, True)[: 1 + (head is FAMILIES[0])]:
        module, batch = module_of(torch.float32, head=head, loss=loss), batch_of(padded=padded)
        monkeypatch.setattr(loss_module, "LK_TEACHERS", len(batch.plan.positions) // 3)
        expected, forward = run(module, batch), module.head_forward
        module.zero_grad()
        module.compile_ahead(batch, WEIGHTS)
        assert module.head_forward is forward
        assert all(p.grad is None for p in module.parameters())
        assert_same(list(run(module, batch).values()), list(expected.values()))
    assert passes == [0] * len(passes) != []  # a CPU has no kernels


@pytest.mark.gpu
@pytest.mark.parametrize("head", FAMILIES[:3], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_first_pass_compiles_nothing(dtype: torch.dtype, head: dict[str, object]) -> None:
    module = module_of(dtype, "cuda", head=head, loss="lk")
    padded = head is FAMILIES[0]
    batch = batch_of(padded=padded).to(torch.device("cuda"))
    with kernels_compiled_ahead() as ahead:
        module.compile_ahead(batch, WEIGHTS)
        before = len(ahead)
        run(module, batch)
    assert ahead == [True] * before
    assert before >= 5
