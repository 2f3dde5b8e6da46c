"""The teacher-forced walk counts what the engine counts (methods §6.3, check 2)."""

from __future__ import annotations

import pytest

from draftlab.heads.block import BlockHead
from draftlab.heads.eagle3 import Eagle3Head
from draftlab.target_model.model import Target
from tests.helpers.walk import assert_walk_matches_engine


@pytest.mark.parametrize(("k", "batch"), [(1, 7), (3, 1), (3, 7), (5, 1)])
def test_the_walk_matches_the_engine(k: int, batch: int, target: Target, head: Eagle3Head) -> None:
    assert_walk_matches_engine(target, head, k, batch)


@pytest.mark.parametrize("k", [1, 2])
def test_the_walk_of_a_causal_block_matches_the_engine_at_any_k(
    k: int, target: Target, block_heads: dict[str, BlockHead]
) -> None:
    """Its first drafts are those of a longer block; tests/engine has the trained K."""
    assert_walk_matches_engine(target, block_heads["causal"], k, 7)
