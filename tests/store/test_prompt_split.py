"""Splits: whole prompts, in their shares, and of single answers what they always were."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from draftlab.progress import Monitor
from draftlab.store.merge_split_sample import select
from draftlab.store.prompt_split import by_prompt, deal, hold_out
from draftlab.store.store import Sample, Store
from draftlab.text.conversations import Conversation, further_id
from draftlab.text.samples import samples
from tests.helpers.small_run import draftlab
from tests.helpers.toys import toy_tokenizer
from tests.store.test_store import make


def answers(*counts: int) -> list[str]:
    """Ids of prompts with so many answers each, in a shuffled order."""
    ids = [further_id(f"p-{i}", sample) for i, n in enumerate(counts) for sample in range(n)]
    return [ids[i] for i in np.random.default_rng(0).permutation(len(ids))]


def prompts(ids: list[str], records: list[int]) -> set[str]:
    return {ids[record].partition("~")[0] for record in records}


def test_a_prompts_records_are_found_by_their_ids() -> None:
    ids = ["a", "b", "a~1", "a#2", "a~1#3", "b~10", "a~x", "r#12", "r#13", "a-1", "c~2", "c~1"]
    assert by_prompt(ids) == [[0, 2, 3, 4], [1, 5], [6], [7], [8], [9], [10, 11]]


def test_the_records_of_a_conversation_are_pieces_of_one_prompt() -> None:
    """Ids as recordings give them: the template drops what an earlier answer begins with."""
    turn = [{"role": "user", "content": "say"}, {"role": "assistant", "content": " word"}]
    template = (
        "{% for m in messages %}{{ m.content if loop.last else m.content | trim }};{% endfor %}"
    )
    given = [Conversation(id_, turn * 3, "") for id_ in ("p", further_id("p", 1), "q")]
    ids = [s.id for s in samples(given, toy_tokenizer(template), Monitor())]
    assert len(ids) > 3
    assert [{ids[i][0] for i in group} for group in by_prompt(ids)] == [{"p"}, {"q"}]


@pytest.mark.parametrize(("count", "shares"), [(10, [1, 1]), (101, [95, 5]), (7, [1, 1, 1])])
def test_single_numbers_are_dealt_in_their_shares(count: int, shares: list[float]) -> None:
    each = [[number] for number in range(count)]
    parts = deal(each, shares, 3)
    assert sorted(i for part in parts for i in part) == list(range(count))
    for part, share in zip(parts, shares, strict=True):
        assert abs(len(part) - share / sum(shares) * count) < 1
        assert part == sorted(part)
    assert deal(each, shares, 3) == parts != deal(each, shares, 4)


def test_single_numbers_are_dealt_to_the_nearest_size() -> None:
    for count in range(2, 60):
        each = [[number] for number in range(count)]
        for first in range(1, count):
            assert len(deal(each, [first, count - first], 0)[0]) == first
    assert len(deal([[number] for number in range(10)], [62, 38], 0)[0]) == 6


@pytest.mark.parametrize("shares", [[1, 1], [95, 5], [2, 1, 1], [1] * 9])
def test_groups_are_dealt_whole_and_in_their_shares(shares: list[float]) -> None:
    for seed in range(200):
        sizes = np.random.default_rng(seed).integers(1, 6, size=30)
        edges = [0, *sizes.cumsum().tolist()]
        groups = [list(range(*pair)) for pair in pairwise(edges)]
        parts = deal(groups, shares, seed)
        assert sorted(i for part in parts for i in part) == list(range(edges[-1]))
        for part, share in zip(parts, shares, strict=True):
            assert part == sorted(part)
            assert abs(len(part) - share / sum(shares) * edges[-1]) < sizes.max()
        assert all(len({i in part for i in group}) == 1 for group in groups for part in parts)


@pytest.mark.parametrize("share", [0.001, 0.05, 0.3, 0.5, 0.9, 0.999])
def test_no_prompt_is_both_learned_and_validated(share: float) -> None:
    for seed, counts in enumerate(
        [(4,) * 25, (1, 9), (9, 1), (2, 2), (1, 2, 3, 4, 5, 6), (1,) * 40]
    ):
        ids = answers(*counts)
        training, held_out = hold_out(ids, share, seed)
        assert sorted(training + held_out) == list(range(len(ids)))
        assert training == sorted(training)
        assert held_out == sorted(held_out)
        assert training
        assert held_out
        assert not prompts(ids, training) & prompts(ids, held_out)
        wanted = max(1, min(round(share * len(ids)), len(ids) - max(counts)))
        assert wanted <= len(held_out) < wanted + max(counts)
        assert (training, held_out) == hold_out(ids, share, seed)


@pytest.mark.parametrize(("count", "share"), [(1, 0.5), (2, 0.9), (100, 0.05), (37, 0.2), (9, 0.0)])
def test_of_one_answer_a_prompt_the_split_is_that_of_earlier_runs(count: int, share: float) -> None:
    """A training that goes on from a checkpoint must not meet what it was validated on."""
    order = np.random.default_rng([7, 1]).permutation(count).tolist()
    size = min(max(1, round(share * count)), count - 1) if share else 0
    expected = sorted(order[size:]), sorted(order[:size])
    assert hold_out([f"p-{i}" for i in range(count)], share, 7) == expected


def test_nothing_is_held_out_of_one_prompt_or_with_no_share() -> None:
    assert hold_out(answers(6), 0.5, 0) == ([*range(6)], [])
    assert hold_out(answers(3, 3), 0.0, 0) == ([*range(6)], [])


def test_a_stores_parts_have_whole_prompts(tmp_path: Path) -> None:
    ids = answers(*[3] * 12)
    make(tmp_path / "s", [Sample(id_, (1, 2, 3, 4), (0, 1, 1, 1), 0.0) for id_ in ids])
    split = ("store", "split", "s", "--out", "a", "--out", "b", "--shares", "70,30")
    assert draftlab(tmp_path, *split).exit_code == 0
    a, b = (set(Store.open(tmp_path / part).ids) for part in "ab")
    assert sorted(a | b) == sorted(ids)
    assert len(a) + len(b) == 36
    assert abs(len(a) - 0.7 * 36) < 3
    assert not {i.partition("~")[0] for i in a} & {i.partition("~")[0] for i in b}

    one = [number for number, id_ in enumerate(ids) if id_.startswith("p-1~")]
    select(Store.open(tmp_path / "s"), one, tmp_path / "t", {}, Monitor())
    result = draftlab(tmp_path, "store", "split", "t", "--out", "c", "--out", "d")
    assert result.exit_code == 2
    assert "found none of 2 for d" in result.output
    assert "ask for fewer parts: all records answer one prompt" in " ".join(result.output.split())
    assert not (tmp_path / "c").exists()
