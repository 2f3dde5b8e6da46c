"""The comparison behind `make parity-llamacpp`: it clips as llama.cpp does, and finds faults."""

from __future__ import annotations

from dataclasses import replace

import pytest

from draftlab.engine.counters import Counters
from draftlab.engine.sampling import Generation
from tests.helpers.drivers import load

llamacpp = load("parity/parity_llamacpp")


def decoded(name: str, steps: tuple[int, ...], k: int = 3, finish: str = "length") -> Generation:
    counters = Counters(k)
    for accepted in steps:
        counters.add_step(k, accepted)
    tokens = tuple(range(10, 11 + len(steps) + sum(steps)))
    drafted = tuple((k, accepted) for accepted in steps)
    return Generation(name, tokens, finish, counters, (), drafted, 0.1, 0.2)


@pytest.mark.parametrize(
    ("steps", "limit", "draft_tokens", "accepted_at"),
    [
        ((3, 0, 2), 100, 9, [2, 2, 1]),  # far from the end nothing is clipped
        ((3, 3), 8, 5, [2, 2, 1]),  # 1 + 4 tokens; of the last 3, two may be drafts
        ((3, 3), 7, 4, [2, 1, 1]),
        ((3, 3), 6, 3, [1, 1, 1]),  # one token may come: none is drafted
        ((0, 3), 3, 1, [0, 0, 0]),
        ((3, 3), 5, 3, [1, 1, 1]),
        ((), 1, 0, [0, 0, 0]),
    ],
)
def test_the_end_clips_drafts_and_what_of_them_is_accepted(
    steps: tuple[int, ...], limit: int, draft_tokens: int, accepted_at: list[int]
) -> None:
    found = llamacpp.clipped(decoded("a", steps), 3, limit)
    assert (found.draft_tokens, found.accepted_at) == (draft_tokens, accepted_at)
    assert found.accepted == sum(accepted_at)


@pytest.mark.parametrize(
    ("steps", "tokens", "accepted_at"),
    [
        ((0, 3), 6, [1, 1, 1]),  # the stop token is the bonus behind the drafts
        ((0, 3), 5, [1, 1, 1]),  # it is the last draft, and counts
        ((0, 3), 4, [1, 0, 0]),  # the second draft: one before it was accepted
        ((0, 3), 3, [0, 0, 0]),
        ((3, 1), 7, [2, 1, 1]),  # the bonus of a step that was cut by a mismatch
        ((3, 1), 6, [1, 1, 1]),
    ],
)
def test_a_drafted_stop_token_ends_what_is_accepted(
    steps: tuple[int, ...], tokens: int, accepted_at: list[int]
) -> None:
    generation = decoded("a", steps, finish="stop")
    cut = replace(generation, token_ids=generation.token_ids[:tokens])
    found = llamacpp.clipped(cut, 3, 100)
    assert (found.draft_tokens, found.accepted_at) == (6, accepted_at)


SIDE = [decoded("a", (3, 0, 2)), decoded("b", (1, 1), finish="stop")]
STOPS = frozenset({14})
CLIPPED = [llamacpp.clipped(g, 3, 100) for g in SIDE]


def answer(generation: Generation, counters: Counters) -> llamacpp.Answer:
    return llamacpp.Answer(
        generation.token_ids,
        generation.finish == "stop",
        counters.draft_tokens,
        counters.accepted,
    )


THEIRS = [answer(g, c) for g, c in zip(SIDE, CLIPPED, strict=True)]


def test_equal_answers_are_equal_with_and_without_the_stop_token() -> None:
    assert SIDE[1].token_ids[-1] in STOPS
    assert llamacpp.first_difference(SIDE, THEIRS, CLIPPED, STOPS) is None
    bare = [THEIRS[0], replace(THEIRS[1], token_ids=THEIRS[1].token_ids[:-1])]
    assert llamacpp.first_difference(SIDE, bare, CLIPPED, STOPS) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"token_ids": (10, 99, 12, 13)}, "prompt b, token 1: draftlab 11, llama.cpp 99"),
        ({"token_ids": (10, 11)}, "prompt b: draftlab 4 tokens, llama.cpp 2"),
        ({"stopped": False}, "prompt b: draftlab ends by stop"),
        ({"draft_tokens": 5}, "prompt b, draft_tokens: draftlab 6, llama.cpp 5"),
        ({"accepted": 3}, "prompt b, accepted: draftlab 2, llama.cpp 3"),
    ],
)
def test_the_first_difference_names_prompt_and_both_values(change: dict, said: str) -> None:
    theirs = [THEIRS[0], replace(THEIRS[1], **change)]
    assert said in (llamacpp.first_difference(SIDE, theirs, CLIPPED, STOPS) or "")
