"""The mask token of a parallel head: one that no text ever holds (methods §4)."""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import Any

import torch
from torch import Tensor

from draftlab.errors import UserError
from draftlab.heads.config import row_fault
from draftlab.store.store import Store

MASK = "<|mask|>"
_RESERVED = ("reserved", "unused", "extra_id")
"""Parts of the names that tokenizers give to tokens they hold in reserve."""


def token_counts(store: Store) -> Tensor:
    """How often a store's prompts and answers hold each token, int64 [V]."""
    counts = torch.zeros(store.identity.vocab_size, dtype=torch.int64)
    for index in range(len(store)):
        tokens, _ = store.tokens_and_spans(index)
        counts += torch.bincount(tokens, minlength=len(counts))
    return counts


def choose_mask_token(
    asked: int | str, tokenizer: Any, num_rows: int, stops: Set[int], counts: Tensor | None
) -> int:
    """The id of the token that masked slots hold.

    "auto" takes the first that will do of: the tokenizer's mask token, `<|mask|>`, a special token
    held in reserve, an embedding row that no token has.

    Args:
        asked: "auto", a token's name, or an id.
        num_rows: rows of the target's embeddings, V.
        stops: ids that end an answer.
        counts: `token_counts` of the data; None: not known yet.

    Raises:
        UserError: no such token, or one that the template or the data holds, or that ends answers.
    """
    template = str(tokenizer.chat_template or "")

    def fault(token: int) -> str | None:
        """Why a token will not do."""
        if outside := row_fault(token, num_rows):
            return outside
        name = tokenizer.convert_ids_to_tokens(token) if token < len(tokenizer) else None
        if token in stops:
            return "ends an answer"
        if name is not None and name in template:
            return "is written by the chat template"
        if counts is not None and counts[token]:
            return f"occurs {int(counts[token]):,} times in the recorded conversations"
        return None

    if asked == "auto":
        for token in _candidates(tokenizer, num_rows):
            if fault(token) is None:
                return token
        raise UserError(
            "found no mask token: the tokenizer has no unused mask or reserved token, and every "
            f"one of the {num_rows} rows of embeddings has a token",
            where="head.mask_token",
            do="name a token that never occurs, by its name or id",
        )
    token = _id_of(asked, tokenizer)
    if why := fault(token):
        raise _refusal(asked, token, why)
    return token


def check_mask_id(asked: int | str, num_rows: int) -> None:
    """As much of `choose_mask_token` as needs no tokenizer: an id is that of a row of embeddings.

    Raises:
        UserError: it is not.
    """
    if isinstance(asked, int) and (why := row_fault(asked, num_rows)):
        raise _refusal(asked, asked, why)


def _refusal(asked: int | str, token: int, why: str) -> UserError:
    found = f"id {token}" if asked == token else f"{asked!r} (id {token})"
    return UserError(
        f"expected a token that no text ever holds, found {found}, which {why}",
        where="head.mask_token",
        do='name another, or "auto"',
    )


def _candidates(tokenizer: Any, num_rows: int) -> Iterator[int]:
    if tokenizer.mask_token_id is not None:
        yield tokenizer.mask_token_id
    added = {str(token): i for i, token in sorted(tokenizer.added_tokens_decoder.items())}
    if MASK in added:
        yield added[MASK]
    yield from (i for name, i in added.items() if any(part in name for part in _RESERVED))
    yield from range(len(tokenizer), num_rows)


def _id_of(asked: int | str, tokenizer: Any) -> int:
    if isinstance(asked, int):
        return asked
    token = tokenizer.convert_tokens_to_ids(asked)
    # Of a name it does not know a tokenizer gives the id of its unknown token, or none.
    if token is None or tokenizer.convert_ids_to_tokens(token) != asked:
        raise UserError(
            f"expected a token of the target's tokenizer, found {asked!r}",
            where="head.mask_token",
            do="name it as the vocabulary writes it, or give its id",
        )
    return int(token)
