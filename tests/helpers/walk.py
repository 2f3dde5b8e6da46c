"""The teacher-forced walk of validation beside the engine's steps on the same answers."""

from __future__ import annotations

from typing import Any

from draftlab.engine.counters import Counters
from draftlab.engine.drafter import new_drafter
from draftlab.engine.engine import Engine
from draftlab.engine.sampling import Generation, Request
from draftlab.heads.head import DraftHead
from draftlab.store.store import Record
from draftlab.target_model.model import Target
from draftlab.train.batch.packing import pack
from draftlab.train.objectives.loss import DraftTeacher
from draftlab.train.validation import score, validate
from draftlab.train.validation import walk as count_walk
from tests.helpers.greedy_answers import answers, greedy_records, run
from tests.helpers.list_store import ListStore

Walk = dict[str, list[tuple[int, int]]]
"""(position, accepted drafts) of each step, by request id."""


def walk_and_decode(
    target: Target, head: DraftHead, k: int, batch: int, records: list[Record] | None = None
) -> tuple[Walk, list[tuple[Request, Generation]]]:
    """Return the walk and the engine's generations of 20 greedy answers.

    Args:
        records: records of the answers; None: those of the target.
    """
    pairs = answers(target, 20, seed=100)  # the head was trained on them, so long runs occur
    store: Any = ListStore(records or greedy_records(target, pairs))
    teacher = DraftTeacher.of(target.parts, head)
    steps, counters = {}, Counters(k)
    for record in store.records:
        hits = score(head, teacher, pack([[record]], len(record.tokens), k)).hits[0]
        counted, steps[record.id] = count_walk(hits, record.spans, k)
        counters += counted
    assert validate(head, teacher, store, range(len(pairs)), num_steps=k).walk == counters
    engine = Engine(target, new_drafter(head, k), batch=batch, max_length=target.max_length)
    generations = run(engine, [request for request, _ in pairs])
    assert [g.token_ids for g in generations] == [g.token_ids for _, g in pairs]
    return steps, [(r, g) for (r, _), g in zip(pairs, generations, strict=True)]


def assert_walk_matches_engine(target: Target, head: DraftHead, k: int, batch: int) -> None:
    """Check that every step of the walk is the engine's and that only a tail is left out."""
    steps, decoded = walk_and_decode(target, head, k, batch)
    all_accepted: list[int] = []
    for request, generation in decoded:
        walk = steps[request.id]
        accepted = [count for _, count in walk]
        assert accepted == [count for _, count in generation.steps[: len(walk)]], request.id
        # Each step starts where the one before ended, the first at the prompt's last token.
        position = len(request.prompt_ids) - 1
        for t, count in walk:
            assert t == position
            position += count + 1
        # The walk leaves out the answer's tail: fewer tokens than a whole step may emit.
        assert len(request.prompt_ids) + len(generation.token_ids) - 1 - position <= k + 1
        all_accepted += accepted
    assert len(all_accepted) > 50
    assert {0, 1, k} <= set(all_accepted)  # otherwise the test proves little
