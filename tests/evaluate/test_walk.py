"""The teacher-forced walk counts what the engine counts (methods §6.3, check 2)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftlab.heads.block import BlockHead
from draftlab.heads.eagle3 import Eagle3Head
from draftlab.target_model.model import Target
from tests.helpers.greedy_answers import answers, greedy_records
from tests.helpers.walk import assert_walk_matches_engine, walk_and_decode


@pytest.mark.parametrize(("k", "batch"), [(1, 7), (3, 1), (3, 7), (5, 1)])
def test_the_walk_matches_the_engine(k: int, batch: int, target: Target, head: Eagle3Head) -> None:
    assert_walk_matches_engine(target, head, k, batch)


@pytest.mark.parametrize("k", [1, 2])
def test_the_walk_of_a_causal_block_matches_the_engine_at_any_k(
    k: int, target: Target, block_heads: dict[str, BlockHead]
) -> None:
    """Its first drafts are those of a longer block; tests/engine has the trained K."""
    assert_walk_matches_engine(target, block_heads["causal"], k, 7)


@pytest.mark.parametrize("shift", [-1, 1])
def test_features_of_a_neighbour_position_are_detected(
    shift: int, target: Target, head: Eagle3Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A common misalignment: the engine shows the head another position's features."""
    states = Target.states

    def shifted(self: Target, *args: Any, **options: Any) -> Any:
        original = states(self, *args, **options)
        features = torch.roll(original.features, shift, dims=1)
        return SimpleNamespace(features=features, last=original.last)

    records = greedy_records(target, answers(target, 20, seed=100))
    monkeypatch.setattr(Target, "states", shifted)
    steps, decoded = walk_and_decode(target, head, 3, 7, records)
    assert any(
        [count for _, count in steps[r.id]] != [count for _, count in g.steps[: len(steps[r.id])]]
        for r, g in decoded
    )
