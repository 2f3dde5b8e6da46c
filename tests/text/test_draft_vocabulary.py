"""The draft vocabulary: what is counted, who is in, and the invariant of d2t and t2d."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from draftlab.errors import UserError
from draftlab.text.draft_vocabulary import DraftVocabulary, build_draft_vocabulary
from draftlab.text.settings import DraftVocabSettings

V = 20


class TokenStore:
    """As much of a store as the counting reads: tokens and spans, never states."""

    def __init__(self, *conversations: tuple[list[int], list[int]]) -> None:
        self.conversations = conversations

    def __len__(self) -> int:
        return len(self.conversations)

    def tokens_and_spans(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, spans = self.conversations[index]
        return torch.tensor(tokens), torch.tensor(spans)


def build(store: Any, size: int | None, always: Any = (), never: Any = ()) -> DraftVocabulary:
    return build_draft_vocabulary(store, size, always, never, V)


def answers(*tokens: int) -> TokenStore:
    """One conversation whose predicted tokens are exactly `tokens`."""
    return TokenStore(([0, 1, *tokens], [0, 1] + [1] * len(tokens)))


def test_counts_every_token_of_an_answer_but_its_first() -> None:
    #        prompt  first   first of the next answer, right behind  prompt
    tokens = [5, 5, 9, 7, 7, 8, 6, 6, 6, 5]
    spans_ = [0, 0, 1, 1, 1, 2, 2, 2, 2, 0]
    found = build(TokenStore((tokens, spans_)), 2)
    assert found.target_ids.tolist() == [6, 7]
    assert found.coverage == 1.0
    assert build(TokenStore((tokens, spans_)), 1).target_ids.tolist() == [6]
    assert build(TokenStore((tokens, spans_)), 1).coverage == 3 / 5


def test_a_document_that_opens_with_its_answer() -> None:
    # x_1 would need a draft at t = −1.
    assert build(TokenStore(([3, 4, 5], [1, 1, 1])), 1).target_ids.tolist() == [5]


def test_ties_go_to_the_lowest_id() -> None:
    found = build(answers(9, 4, 7, 9, 4, 7, 12), 2)
    assert found.target_ids.tolist() == [4, 7]
    assert found.coverage == 4 / 7


def test_always_are_in_when_they_occur_and_only_then() -> None:
    store = answers(*[3] * 5, *[4] * 4, *[8] * 3, 17)
    found = build(store, 3, always=[17, 19])
    assert found.target_ids.tolist() == [3, 4, 17]
    assert found.coverage == 10 / 13


def test_too_few_kinds_are_filled_with_the_lowest_unused() -> None:
    found = build(answers(1, 3, 3), 5, never=[2])
    assert found.target_ids.tolist() == [0, 1, 3, 4, 5]
    assert found.coverage == 1.0


def test_the_mask_token_is_never_in() -> None:
    store = answers(6, 6, 6, 5)
    for size in (1, 2, 19, 20, 100, None):
        assert 6 not in build(store, size, always=[6], never=[6]).target_ids
    assert build(store, 1, never=[6]).coverage == 1 / 4


@pytest.mark.parametrize("size", [None, V, V + 1])
def test_all_of_them(size: int | None) -> None:
    found = build(answers(1, 2), size)
    assert found.target_ids.tolist() == list(range(V))
    assert found.coverage == 1.0
    assert not found.d2t.any()


def test_refusals() -> None:
    with pytest.raises(UserError, match="at least 3"):
        build(answers(1, 2, 3, 3), 2, always=[1, 2, 3])
    with pytest.raises(UserError, match="mask token"):
        build(answers(1, 2), V - 1, never=[4, 5])
    with pytest.raises(ValueError, match=r"0\.\.19"):
        build(answers(1), 2, always=[V])
    with pytest.raises(ValidationError):
        DraftVocabSettings(size=0)


token_lists = st.lists(st.integers(0, V - 1), min_size=1, max_size=60)


@given(token_lists, st.integers(1, V - 1), st.sets(st.integers(0, V - 1), max_size=3))
def test_invariants(tokens: list[int], size: int, banned: set[int]) -> None:
    size = min(size, V - len(banned))
    found = build(answers(*tokens), size, never=banned)
    ids = found.target_ids
    assert ids.dtype == torch.int64
    assert len(ids) == size
    assert torch.equal(torch.nonzero(found.t2d(V)).flatten(), torch.arange(size) + found.d2t)
    assert torch.equal(ids, ids.unique())
    assert not banned & set(ids.tolist())
    counts = Counter(tokens)
    ranked = sorted((i for i in range(V) if i not in banned), key=lambda i: (-counts[i], i))
    assert set(ids.tolist()) == set(ranked[:size])
    assert found.coverage == pytest.approx(sum(counts[i] for i in ids.tolist()) / len(tokens))
