"""The draft vocabulary: which tokens count, which are chosen, and the invariants of d2t and t2d."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from draftlab.errors import UserError
from draftlab.text.draft_vocabulary import (
    DraftVocabulary,
    build_draft_vocabulary,
    predicted_counts,
)
from draftlab.text.settings import DraftVocabSettings

V = 20


class TokenStore:
    """The part of a store that vocabulary statistics read: (tokens, spans) per conversation."""

    def __init__(self, *conversations: tuple[list[int], list[int]]) -> None:
        self.conversations = conversations
        self.identity = SimpleNamespace(vocab_size=V)

    def __len__(self) -> int:
        return len(self.conversations)

    def tokens_and_spans(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, spans = self.conversations[index]
        return torch.tensor(tokens), torch.tensor(spans)


def build(
    store: TokenStore, size: int | None, required: Iterable[int] = (), excluded: Iterable[int] = ()
) -> DraftVocabulary:
    """Build the vocabulary by a store; coverage is that of the same records."""
    records = range(len(store))
    return build_draft_vocabulary(store, size, required, excluded, V, held_out=records)


def answers(*tokens: int) -> TokenStore:
    """Return a store of one conversation whose predicted tokens are exactly `tokens`."""
    return TokenStore(([0, 1, *tokens], [0, 1] + [1] * len(tokens)))


def test_every_token_of_an_answer_counts_except_its_first() -> None:
    #        prompt  first   first of the adjacent answer   prompt
    tokens = [5, 5, 9, 7, 7, 8, 6, 6, 6, 5]
    spans = [0, 0, 1, 1, 1, 2, 2, 2, 2, 0]
    vocabulary = build(TokenStore((tokens, spans)), 2)
    assert vocabulary.target_ids.tolist() == [6, 7]
    assert vocabulary.coverage == 1.0
    assert build(TokenStore((tokens, spans)), 1).target_ids.tolist() == [6]
    assert build(TokenStore((tokens, spans)), 1).coverage == 3 / 5


def test_the_second_token_of_a_document_does_not_count() -> None:
    # Its draft would be made at t = −1.
    assert build(TokenStore(([3, 4, 5], [1, 1, 1])), 1).target_ids.tolist() == [5]


def test_records_that_follow_each_other_are_counted_apart() -> None:
    # The first two tokens of a record are no labels, whatever span the record before ends in.
    store = TokenStore(([0, 1, 7], [0, 1, 1]), ([2, 3, 7], [1, 1, 1]), ([4], [1]), ([5], [1]))
    counts, others = predicted_counts(store, V, range(4))
    assert counts.nonzero()[0].tolist() == [7]
    assert counts[7] == 2
    assert others[:6].tolist() == [1] * 6


def test_the_mask_token_is_never_chosen() -> None:
    store = answers(6, 6, 6, 5)
    for size in (1, 2, 19, 20, 100, None):
        assert 6 not in build(store, size, required=[6], excluded=[6]).target_ids
    for size in (None, V, V + 1):
        assert build(store, size).target_ids.tolist() == list(range(V))
    assert build(store, 1, excluded=[6]).coverage == 1 / 4
    assert build(store, 1, required=[5, 6], excluded=[6]).target_ids.tolist() == [5]


def test_held_out_records_choose_nothing_and_say_what_is_covered() -> None:
    store = TokenStore(
        ([0, 1, 5, 5, 6], [0, 1, 1, 1, 1]),
        ([0, 1, 9, 9, 9, 5], [0, 1, 1, 1, 1, 1]),
        ([0, 1, 8, 8, 8, 8], [0, 1, 1, 1, 1, 1]),  # neither counted nor judged
    )
    vocabulary = build_draft_vocabulary(store, 2, [], [], V, training=[0], held_out=[1])
    assert vocabulary.target_ids.tolist() == [5, 6]
    assert (vocabulary.coverage, vocabulary.held_out) == (1 / 4, 4)
    alone = build_draft_vocabulary(store, 2, [], [], V, training=[0, 1, 2])
    assert (alone.target_ids.tolist(), alone.coverage) == ([5, 8], None)
    # A stop id that only held-out answers have is not one that training has seen.
    other = build_draft_vocabulary(store, 2, [9], [], V, training=[0], held_out=[1])
    assert other.target_ids.tolist() == [5, 6]


def test_tokens_of_prompts_then_the_lowest_ids_fill_the_vocabulary() -> None:
    #         prompt            answer: its first token is not predicted
    tokens = [12, 15, 15, 12, 15, 17, 6, 6]
    spans = [0, 0, 0, 0, 0, 1, 1, 1]
    chosen = [
        build_draft_vocabulary(TokenStore((tokens, spans)), size, [], [], V) for size in range(1, 7)
    ]
    ids = [set(vocabulary.target_ids.tolist()) for vocabulary in chosen]
    added = [min(more - less) for less, more in pairwise([set(), *ids])]
    assert added == [6, 15, 12, 17, 0, 1]


def test_errors() -> None:
    rare = build(answers(*[3] * 5, *[4] * 4, *[8] * 3, 17), 3, required=[17, 19])
    assert rare.target_ids.tolist() == [3, 4, 17], "required ids that occur"
    with pytest.raises(UserError, match="at least 3"):
        build(answers(1, 2, 3, 3), 2, required=[1, 2, 3])
    with pytest.raises(UserError, match="mask token"):
        build(answers(1, 2), V - 1, excluded=[4, 5])
    with pytest.raises(ValidationError):
        DraftVocabSettings(size=0)


token_lists = st.lists(st.integers(0, V - 1), min_size=1, max_size=60)


@given(token_lists, st.integers(1, V - 1), st.sets(st.integers(0, V - 1), max_size=3))
def test_invariants(tokens: list[int], size: int, excluded: set[int]) -> None:
    size = min(size, V - len(excluded))
    vocabulary = build(answers(*tokens), size, excluded=excluded)
    ids = vocabulary.target_ids
    assert ids.dtype == torch.int64
    assert len(ids) == size
    assert torch.equal(
        torch.nonzero(vocabulary.t2d(V)).flatten(), torch.arange(size) + vocabulary.d2t
    )
    assert torch.equal(ids, ids.unique())
    assert not excluded & set(ids.tolist())
    counts = Counter(tokens)
    prompt = Counter([0, 1])  # `answers` has both before the predicted tokens
    allowed = (i for i in range(V) if i not in excluded)
    ranked = sorted(allowed, key=lambda i: (-counts[i], 0 if counts[i] else -prompt[i], i))
    assert set(ids.tolist()) == set(ranked[:size])
    assert vocabulary.coverage == pytest.approx(sum(counts[i] for i in ids.tolist()) / len(tokens))
