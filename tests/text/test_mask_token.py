"""The mask token: which token is chosen, and which ones are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import AddedToken
from torch import Tensor

from draftlab.errors import UserError
from draftlab.text.mask_token import choose_mask_token
from tests.helpers.toys import LLAMA3_TEMPLATE, toy_tokenizer

MASK, IM_START, EOT, ROWS = 288, 286, 285, 300


def choose(
    requested: int | str = "auto",
    tokenizer: Any = None,
    counts: Tensor | None = None,
    rows: int = ROWS,
) -> int:
    return choose_mask_token(requested, tokenizer or toy_tokenizer(), rows, {EOT}, counts)


def counts_of(*tokens: int) -> Tensor:
    return torch.bincount(torch.tensor(tokens), minlength=ROWS)


def without_mask(*reserved: str) -> Any:
    """Return the toy tokenizer without a declared mask token, with reserved tokens added."""
    tokenizer = toy_tokenizer()
    tokenizer.mask_token = None
    tokenizer.add_tokens([AddedToken(name, special=True) for name in reserved], special_tokens=True)
    return tokenizer


def test_auto_goes_from_mask_to_reserved_to_unused_rows() -> None:
    assert choose() == MASK
    assert choose(tokenizer=without_mask()) == MASK  # by its name
    reserved = without_mask("<|reserved_special_token_0|>", "<|reserved_special_token_1|>")
    assert choose(tokenizer=reserved, counts=counts_of(MASK)) == MASK + 1
    assert choose(tokenizer=reserved, counts=counts_of(MASK, MASK + 1)) == MASK + 2
    assert len(toy_tokenizer()) == MASK + 1
    assert choose(tokenizer=without_mask(), counts=counts_of(MASK)) == MASK + 1
    with pytest.raises(UserError, match=r"289 rows(?s:.*)added_tokens in tokenizer\.json"):
        choose(tokenizer=without_mask(), counts=counts_of(MASK), rows=289)


def test_auto_skips_tokens_of_the_template_and_stop_tokens() -> None:
    tokenizer = toy_tokenizer(LLAMA3_TEMPLATE + "<|mask|>")
    assert choose(tokenizer=tokenizer) == MASK + 1
    assert choose_mask_token("auto", toy_tokenizer(), ROWS, {MASK}, None) == MASK + 1


def test_auto_prefers_the_token_of_the_head_that_training_starts_from() -> None:
    """Where that one is not usable, auto takes what it takes without it."""
    arguments = "auto", toy_tokenizer(), ROWS, {EOT}
    assert choose_mask_token(*arguments, None, 299) == 299
    assert choose_mask_token(*arguments, counts_of(299), 299) == MASK
    assert choose_mask_token(MASK, *arguments[1:], None, 299) == MASK


@pytest.mark.parametrize(
    ("requested", "expected"), [("<|im_start|>", IM_START), (MASK, MASK), (299, 299)]
)
def test_a_token_by_name_or_id(requested: int | str, expected: int) -> None:
    assert choose(requested, counts=counts_of(1, 2)) == expected


@pytest.mark.parametrize(
    ("requested", "message"),
    [
        ("<|nonsense|>", r"expected a token of the target's tokenizer, found '<\|nonsense\|>'"),
        (300, r"found id 300, which lies outside the 300 rows of embeddings \(ids 0 to 299\)"),
        (-1, "found id -1, which lies outside the 300 rows of embeddings"),
        ("<|eot_id|>", r"'<\|eot_id\|>' \(id 285\), which ends an answer"),
        ("<|end_header_id|>", "is written by the chat template"),
        ("user", "occurs 2 times in the recorded conversations"),
        ("~", "is no added token, so that ordinary text can contain it"),
    ],
)
def test_an_unusable_token_is_refused_with_the_reason(requested: int | str, message: str) -> None:
    user = toy_tokenizer().convert_tokens_to_ids("user")
    with pytest.raises(UserError, match=message):
        choose(requested, counts=counts_of(1, user, user))
