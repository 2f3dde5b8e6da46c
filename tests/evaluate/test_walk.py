"""The teacher-forced walk counts what the engine counts (methods §6.3, check 2)."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftlab.engine.drafter import ChainDrafter
from draftlab.engine.engine import Engine
from draftlab.engine.sampling import Generation, Request
from draftlab.heads.eagle3 import Eagle3Head
from draftlab.heads.head import DraftHead
from draftlab.store.store import Record
from draftlab.target_model.model import Target
from draftlab.train.objectives.loss import DraftTeacher
from draftlab.train.validation import validate
from tests.helpers.greedy_answers import answers, greedy_records, run


class ListStore:
    """Records in memory."""

    def __init__(self, records: list[Record]) -> None:
        self.records = records
        self.lengths = [len(r.tokens) for r in records]

    def views(self, indices: Sequence[int]) -> list[Record]:
        return [self.records[i] for i in indices]


def walked_and_decoded(
    target: Target, head: Eagle3Head, k: int, batch: int
) -> tuple[dict[str, list[tuple[int, int]]], list[tuple[Request, Generation]]]:
    pairs = answers(target, 20, seed=100)  # the head was trained on them: long runs occur
    store: Any = ListStore(greedy_records(target, pairs))
    teacher = DraftTeacher.of(target.parts, head)
    steps = validate(head, teacher, store, range(len(pairs)), num_steps=k).steps
    engine = Engine(target, ChainDrafter(head, k), batch=batch, max_length=target.max_length)
    asked = [request for request, _ in pairs]
    found = run(engine, asked)
    assert [g.token_ids for g in found] == [g.token_ids for _, g in pairs]
    return steps, list(zip(asked, found, strict=True))


def assert_walked_as_decoded(target: Target, head: DraftHead, k: int, batch: int) -> None:
    """Every step of the walk is the engine's, and a tail alone is left out."""
    steps, decoded = walked_and_decoded(target, head, k, batch)
    fates: list[int] = []
    for request, generation in decoded:
        walk = steps[request.id]
        accepted = [count for _, count in walk]
        assert accepted == [count for _, count in generation.steps[: len(walk)]], request.id
        # Each step starts where the one before left off, the first at the prompt's last token.
        at = len(request.prompt_ids) - 1
        for t, count in walk:
            assert t == at
            at += count + 1
        # What is left out is the answer's tail: fewer tokens than a whole step may yield.
        assert len(request.prompt_ids) + len(generation.token_ids) - 1 - at <= k + 1
        fates += accepted
    assert len(fates) > 50
    assert {0, 1, k} <= set(fates)  # or the test says little


@pytest.mark.parametrize(("k", "batch"), [(1, 7), (3, 1), (3, 7), (5, 1)])
def test_every_step_of_the_walk_is_the_engines(
    k: int, batch: int, target: Target, head: Eagle3Head
) -> None:
    assert_walked_as_decoded(target, head, k, batch)


@pytest.mark.parametrize("shift", [-1, 1])
def test_features_of_a_neighbour_are_noticed(
    shift: int, target: Target, head: Eagle3Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The classic misalignment: the head is shown another position's features."""
    states = Target.states

    def shifted(self: Target, *args: Any, **options: Any) -> Any:
        found = states(self, *args, **options)
        features = torch.roll(found.features, shift, dims=1)
        return SimpleNamespace(features=features, last=found.last)

    honest = greedy_records(target, answers(target, 20, seed=100))
    monkeypatch.setattr("tests.evaluate.test_walk.greedy_records", lambda *_: honest)
    monkeypatch.setattr(Target, "states", shifted)
    steps, decoded = walked_and_decoded(target, head, 3, 7)
    assert any(
        [count for _, count in steps[r.id]] != [count for _, count in g.steps[: len(steps[r.id])]]
        for r, g in decoded
    )
