"""The mask token of a parallel head: a token that no text contains (methods §4)."""

from __future__ import annotations

from collections.abc import Iterator, Set
from itertools import chain
from typing import Any

import numpy as np

from draftlab.errors import UserError
from draftlab.heads.config import embedding_row_fault

MASK = "<|mask|>"
_RESERVED = ("reserved", "unused", "extra_id")
"""Parts of the names of tokens that tokenizers reserve."""


def choose_mask_token(
    requested: int | str,
    tokenizer: Any,
    num_rows: int,
    stops: Set[int],
    counts: np.ndarray | None,
    trained: int | None = None,
) -> int:
    """Return the id of the mask token.

    "auto" takes the first usable one of: that of the head that training starts from, the
    tokenizer's mask token, `<|mask|>`, the reserved special tokens, the embedding rows without a
    token.

    Args:
        requested: "auto", a token's name, or an id.
        num_rows: rows of the target's embeddings, V.
        stops: ids that end an answer.
        counts: how often the data have each token, [V]; None: not known yet.
        trained: of the head that training starts from; None: it has none.

    Raises:
        UserError: there is no such token, or it ends answers, or the template or data contains it,
            or it is part of ordinary text: neither an added token nor a row without a token.
    """
    template, added = str(tokenizer.chat_template or ""), tokenizer.added_tokens_decoder

    def fault(token: int) -> str | None:
        """Return why a token is not usable."""
        if outside := embedding_row_fault(token, num_rows):
            return outside
        name = tokenizer.convert_ids_to_tokens(token) if token < len(tokenizer) else None
        if token in stops:
            return "ends an answer"
        if name is not None and name in template:
            return "is written by the chat template"
        if counts is not None and counts[token]:
            return f"occurs {int(counts[token]):,} times in the recorded conversations"
        if name and token not in added and not any(word in name for word in _RESERVED):
            return "is no added token, so that ordinary text can contain it"
        return None

    if requested == "auto":
        for token in chain([] if trained is None else [trained], _candidates(tokenizer, num_rows)):
            if fault(token) is None:
                return token
        raise UserError(
            "found no mask token: the tokenizer has no unused mask or reserved token, and every "
            f"one of the {num_rows} rows of embeddings has a token",
            where="head.mask_token",
            do="name an added token that no text of yours contains as head.mask_token; the ids and "
            "names are under added_tokens in tokenizer.json",
        )
    token = _token_id(requested, tokenizer)
    if reason := fault(token):
        name = f"id {token}" if requested == token else f"{requested!r} (id {token})"
        raise UserError(
            f"expected a token that no text contains, found {name}, which {reason}",
            where="head.mask_token",
            do='name another, or "auto"',
        )
    return token


def _candidates(tokenizer: Any, num_rows: int) -> Iterator[int]:
    if tokenizer.mask_token_id is not None:
        yield tokenizer.mask_token_id
    added = {str(token): i for i, token in sorted(tokenizer.added_tokens_decoder.items())}
    if MASK in added:
        yield added[MASK]
    yield from (i for name, i in added.items() if any(word in name for word in _RESERVED))
    yield from range(len(tokenizer), num_rows)


def _token_id(name: int | str, tokenizer: Any) -> int:
    if isinstance(name, int):
        return name
    token = tokenizer.convert_tokens_to_ids(name)
    # For an unknown name a tokenizer returns None or the id of its unknown token.
    if token is None or tokenizer.convert_ids_to_tokens(token) != name:
        raise UserError(
            f"expected a token of the target's tokenizer, found {name!r}",
            where="head.mask_token",
            do="name it as the vocabulary writes it, or give its id",
        )
    return int(token)
