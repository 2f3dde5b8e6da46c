"""The comparison behind `make parity-llamacpp`: it clips as llama.cpp does, and finds faults."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.helpers.drivers import decoded, load

llamacpp = load("parity/parity_llamacpp")


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
    counters = llamacpp.clipped(decoded("a", steps), 3, limit)
    assert (counters.draft_tokens, counters.accepted_at) == (draft_tokens, accepted_at)
    assert counters.accepted == sum(accepted_at)


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
    counters = llamacpp.clipped(cut, 3, 100)
    assert (counters.draft_tokens, counters.accepted_at) == (6, accepted_at)


DRAFTLAB = [decoded("a", (3, 0, 2)), decoded("b", (1, 1), finish="stop")]
STOPS = frozenset({14})
CLIPPED = [llamacpp.clipped(g, 3, 100) for g in DRAFTLAB]
LLAMACPP = [
    llamacpp.Answer(g.token_ids, g.finish == "stop", counters.draft_tokens, counters.accepted)
    for g, counters in zip(DRAFTLAB, CLIPPED, strict=True)
]


def test_equal_answers_are_equal_with_and_without_the_stop_token() -> None:
    assert DRAFTLAB[1].token_ids[-1] in STOPS
    assert llamacpp.first_difference(DRAFTLAB, LLAMACPP, CLIPPED, STOPS) is None
    bare = [LLAMACPP[0], replace(LLAMACPP[1], token_ids=LLAMACPP[1].token_ids[:-1])]
    assert llamacpp.first_difference(DRAFTLAB, bare, CLIPPED, STOPS) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": (10, 99, 12, 13)}, "prompt b, token 1: draftlab 11, llama.cpp 99"),
        ({"token_ids": (10, 11)}, "prompt b: draftlab 4 tokens, llama.cpp 2"),
        ({"stopped": False}, "prompt b: draftlab ends by stop"),
        ({"draft_tokens": 5}, "prompt b, draft_tokens: draftlab 6, llama.cpp 5"),
        ({"accepted": 3}, "prompt b, accepted: draftlab 2, llama.cpp 3"),
    ],
)
def test_the_first_difference_names_prompt_and_both_values(change: dict, message: str) -> None:
    answers = [LLAMACPP[0], replace(LLAMACPP[1], **change)]
    assert message in (llamacpp.first_difference(DRAFTLAB, answers, CLIPPED, STOPS) or "")
