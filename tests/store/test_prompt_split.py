"""Splits keep prompts together, match their shares, and reproduce earlier splits of answers."""

from __future__ import annotations

import re
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftlab.progress import Monitor
from draftlab.store.columns import Texts
from draftlab.store.prompt_split import group_by_prompt, hash_texts, hold_out, split_groups
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


def split(groups: list[list[int]], shares: list[float], seed: int) -> list[list[int]]:
    """Split groups of consecutive numbers."""
    numbers = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    return [part.tolist() for part in split_groups(numbers, shares, seed)]


def hold_out_lists(ids: list[str], share: float, seed: int) -> tuple[list[int], list[int]]:
    training, validation = hold_out(ids, share, seed)
    return training.tolist(), validation.tolist()


def reference_groups(ids: list[str]) -> list[list[int]]:
    """Group records by regular expressions, one id at a time, as older versions did."""
    prompt_number = re.compile(r"(.*)#(?:0[0-9]*|1|[0-9]+[~#][0-9]+)", re.DOTALL)
    matches = map(prompt_number.fullmatch, ids)
    numbered = {match[1] for match in matches if match} - set(ids)
    groups: dict[str, list[int]] = {}
    for number, id_ in enumerate(ids):
        conversation = re.sub(r"#[0-9]+\Z", "", id_)
        if conversation in numbered:
            conversation = id_
        groups.setdefault(re.sub(r"~[0-9]+\Z", "", conversation), []).append(number)
    return list(groups.values())


@given(
    st.lists(st.text("a~#01259é\n", max_size=6) | st.text(max_size=30), min_size=1, unique=True),
    st.integers(1, 5),
)
@settings(max_examples=500, deadline=None)
def test_groups_are_those_of_regular_expressions(ids: list[str], chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("draftlab.store.prompt_split._CHUNK", chunk)
        assert groups_of(ids) == reference_groups(ids)


def test_hashes_tell_texts_apart() -> None:
    texts = ["", "a", "a\0", *(f"prompt-{i}" for i in range(20_000)), *("x" * n for n in range(40))]
    texts += [text + "~1" for text in texts]
    columns = Texts.of(texts)
    starts = np.concatenate([[0], columns.ends[:-1]])
    hashes = hash_texts(columns.utf8, starts, columns.ends)
    numbers = {text: i for i, text in enumerate(dict.fromkeys(texts))}
    assert len(np.unique(hashes)) == len(numbers)
    assert hash_texts(columns.utf8, starts, starts)[5] == hashes[0]


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


def check_parts(parts: list[list[int]], shares: list[float], count: int, bound: int) -> None:
    assert sorted(i for part in parts for i in part) == list(range(count))
    for part, share in zip(parts, shares, strict=True):
        assert part == sorted(part)
        assert abs(len(part) - share / sum(shares) * count) < bound


@pytest.mark.parametrize(("count", "shares"), [(10, [1, 1]), (101, [95, 5]), (7, [1, 1, 1])])
def test_single_records_are_split_by_their_shares(count: int, shares: list[float]) -> None:
    groups = [[number] for number in range(count)]
    parts = split(groups, shares, 3)
    check_parts(parts, shares, count, 1)
    assert split(groups, shares, 3) == parts != split(groups, shares, 4)


def test_single_records_are_split_to_the_nearest_size() -> None:
    for count in range(2, 60):
        groups = [[number] for number in range(count)]
        for first in range(1, count):
            assert len(split(groups, [first, count - first], 0)[0]) == first
    assert len(split([[number] for number in range(10)], [62, 38], 0)[0]) == 6


@pytest.mark.parametrize("shares", [[1, 1], [95, 5], [2, 1, 1], [1] * 9])
def test_groups_stay_whole_and_are_split_by_their_shares(shares: list[float]) -> None:
    for seed in range(200):
        sizes = np.random.default_rng(seed).integers(1, 6, size=30)
        edges = [0, *sizes.cumsum().tolist()]
        groups = [list(range(*pair)) for pair in pairwise(edges)]
        parts = split(groups, shares, seed)
        check_parts(parts, shares, edges[-1], sizes.max())
        assert all(len({i in part for i in group}) == 1 for group in groups for part in parts)


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
