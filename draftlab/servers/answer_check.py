"""Checks of what another program sends as an answer, before it is stored."""

from __future__ import annotations

from typing import Any

MAX_TEXT = 200
"""Characters of an answer that a message quotes."""


def is_token_id(value: Any, vocab_size: int) -> bool:
    """Return whether a JSON value is a token id: a whole number of the vocabulary."""
    return type(value) is int and 0 <= value < vocab_size


def answer_fault(tokens: Any, vocab_size: int, max_tokens: int) -> str:
    """Return "expected …, found …" for token ids that are no answer; "": they are.

    Args:
        tokens: what the program sent.
        vocab_size: rows of the target's embedding.
        max_tokens: most tokens that the program was asked for.
    """
    if not isinstance(tokens, list):
        return f"expected a list of token ids, found {repr(tokens)[:MAX_TEXT]}"
    for position, token in enumerate(tokens):
        if not is_token_id(token, vocab_size):
            return (
                f"expected token ids from 0 to {vocab_size - 1:,}, found "
                f"{repr(token)[:MAX_TEXT]} at position {position:,}"
            )
    if len(tokens) > max_tokens:
        return f"expected at most {max_tokens:,} tokens, found {len(tokens):,}"
    return ""
