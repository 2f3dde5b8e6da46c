"""Splits keep prompts together, match their shares, and depend on the seed alone."""

from __future__ import annotations

import numpy as np
import pytest

from draftlab.progress import Monitor
from draftlab.store.prompt_split import group_by_prompt, hold_out
from draftlab.text.conversations import Conversation, answer_id
from draftlab.text.samples import build_samples
from tests.helpers.toys import toy_tokenizer


def answer_ids(*counts: int) -> list[str]:
    """Return ids of prompts with these numbers of answers, in a shuffled order."""
    ids = [answer_id(f"p-{i}", sample) for i, n in enumerate(counts) for sample in range(n)]
    return [ids[i] for i in np.random.default_rng(0).permutation(len(ids))]


def prompts_of(ids: list[str]) -> set[str]:
    return {id_.partition("~")[0] for id_ in ids}


def groups_of(ids: list[str]) -> list[list[int]]:
    """Return the record numbers of each prompt."""
    prompts = group_by_prompt(ids)
    return [np.flatnonzero(prompts == prompt).tolist() for prompt in range(prompts.max() + 1)]


def hold_out_lists(ids: list[str], share: float, seed: int) -> tuple[list[int], list[int]]:
    training, validation = hold_out(ids, share, seed)
    return training.tolist(), validation.tolist()


def test_records_are_grouped_by_their_ids() -> None:
    ids = ["a", "b", "a~1", "a#2", "a~1#3", "b~10", "a~x", "r#12", "q#13", "a-1", "c~2", "c~1"]
    assert groups_of(ids) == [[0, 2, 3, 4], [1, 5], [6], [7], [8], [9], [10, 11]]


def test_records_of_a_prompt_whose_first_record_was_left_out_stay_together() -> None:
    ids = ["x#2", "a~1#2", "y#12", "x#3", "a", "b#2", "b~1", "z~1#2", "z~1#4"]
    assert groups_of(ids) == [[0, 3], [1, 4], [2], [5, 6], [7, 8]]
    for seed in range(20):
        left_out = [f"p-{i}#{n}" for i in range(6) for n in (2, 3)]
        parts = [{left_out[i][:3] for i in part} for part in hold_out_lists(left_out, 0.5, seed)]
        assert not parts[0] & parts[1]


@pytest.mark.parametrize("ids", [["r#1", "r#2", "r#13"], ["r#0", "r#5"], ["r#5", "r#7", "r#5~1"]])
def test_prompts_that_are_named_by_a_number_are_apart(ids: list[str]) -> None:
    assert len(groups_of(ids)) == len({id_.partition("~")[0] for id_ in ids})
    assert groups_of([*ids, "r"]) != groups_of(ids)


def test_the_records_of_a_conversation_belong_to_one_prompt() -> None:
    """The template trims earlier answers, so each answer needs a record of its own."""
    turn = [{"role": "user", "content": "say"}, {"role": "assistant", "content": " word"}]
    template = (
        "{% for m in messages %}{{ m.content if loop.last else m.content | trim }};{% endfor %}"
    )
    conversations = [Conversation(id_, turn * 3, "") for id_ in ("p", answer_id("p", 1), "q")]
    ids = [s.id for s in build_samples(conversations, toy_tokenizer(template), Monitor())]
    assert len(ids) > 3
    assert [{ids[i][0] for i in group} for group in groups_of(ids)] == [{"p"}, {"q"}]


@pytest.mark.parametrize("share", [0.001, 0.05, 0.3, 0.5, 0.9, 0.999])
def test_no_prompt_is_in_both_training_and_validation(share: float) -> None:
    for seed, counts in enumerate(
        [(4,) * 25, (1, 9), (9, 1), (2, 2), (1, 2, 3, 4, 5, 6), (1,) * 40]
    ):
        ids = answer_ids(*counts)
        training, validation = hold_out_lists(ids, share, seed)
        assert sorted(training + validation) == list(range(len(ids)))
        for part in (training, validation):
            assert part
            assert part == sorted(part)
        assert not prompts_of([ids[i] for i in training]) & prompts_of([ids[i] for i in validation])
        size = max(1, min(round(share * len(ids)), len(ids) - max(counts)))
        assert size <= len(validation) < size + max(counts)
        assert (training, validation) == hold_out_lists(ids, share, seed)


def test_nothing_is_held_out_of_one_prompt_or_with_no_share() -> None:
    assert hold_out_lists(answer_ids(6), 0.5, 0) == ([*range(6)], [])
    assert hold_out_lists(answer_ids(3, 3), 0.0, 0) == ([*range(6)], [])


def test_a_seed_holds_out_the_same_records_in_every_version() -> None:
    assert hold_out_lists([f"p-{i}" for i in range(20)], 0.2, 7)[1] == [10, 14, 17, 18]
