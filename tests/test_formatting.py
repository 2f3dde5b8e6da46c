"""Texts of numbers and exit codes, and errors of writing files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draftlab.errors import UserError
from draftlab.files import save_tensors
from draftlab.formatting import count_text, exit_text, rounded_text, size_text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999.7, "1,000 B"),
        (1020, "1.02 kB"),
        (3_295_000, "3.29 MB"),
        (33.1e9, "33.1 GB"),
        (999.9e9, "1,000 GB"),
        (4.1234e15, "4,120 TB"),
    ],
)
def test_sizes_keep_three_digits(size: int, text: str) -> None:
    assert size_text(size) == text


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (0.07644, 3, "0.0764"),
        (1526.2, 3, "1,530"),
        (187.3, 2, "190"),
        (123_456_789, 3, "123,000,000"),
        (0, 3, "0"),
        (1, 3, "1"),
    ],
)
def test_numbers_keep_their_digits_and_show_no_exponent(
    value: float, digits: int, text: str
) -> None:
    assert rounded_text(value, digits) == text


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (0, "exit code 0"),
        (3, "exit code 3"),
        (-9, "killed by SIGKILL"),
        (-37, "killed by signal 37"),
    ],
)
def test_exit_codes(code: int, text: str) -> None:
    assert exit_text(code) == text


def test_counts() -> None:
    assert [count_text(n, "process") for n in (1, 2)] == ["1 process", "2 processes"]
    assert [count_text(n, "shard") for n in (1, 0)] == ["1 shard", "0 shards"]


def test_tensors_that_cannot_be_written_are_a_user_error(tmp_path: Path) -> None:
    """safetensors raises its own type for a full disk as for a missing folder."""
    with pytest.raises(UserError, match="could not be written") as caught:
        save_tensors({"a": torch.zeros(3)}, tmp_path / "gone" / "a.safetensors")
    assert "gone" in str(caught.value.where)
    assert caught.value.do
