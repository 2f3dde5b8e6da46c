"""What every room stands on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pytest
import torch
from pydantic import Field, ValidationError

from draftlab.errors import UserError
from draftlab.files import save_tensors
from draftlab.formatting import counted, ended_text, rounded_text, size_text
from draftlab.settings import Settings, complaints


def test_tensors_that_cannot_be_written_are_the_disks_fault(tmp_path: Path) -> None:
    """safetensors raises its own type for a full disk as for a folder that is not there."""
    with pytest.raises(UserError, match="could not be written") as caught:
        save_tensors({"a": torch.zeros(3)}, tmp_path / "gone" / "a.safetensors")
    assert "gone" in str(caught.value.where)
    assert caught.value.do


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


class Inner(Settings):
    rate: Annotated[float, Field(gt=0)] = 1.0


class Outer(Settings):
    many: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)] = (1,)
    inner: Inner = Inner()
    name: str = Field(default="a", pattern="^a")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"many": [0]}, "many.0: expected a number greater than or equal to 1, found 0"),
        ({"many": []}, "many: expected at least one value, found none"),
        ({"many": ["x"]}, "many.0: expected a whole number, found 'x'"),
        ({"inner": 3}, "inner: expected a mapping of settings, found 3"),
        ({"inner": {"rate": 0}}, "inner.rate: expected a number greater than 0, found 0"),
        ({"inner": {"rat": 1}}, "inner.rat: unknown key"),
        ({"name": "b"}, "name: expected a text that matches ^a, found 'b'"),
    ],
)
def test_complaints_are_one_line_a_fault(given: dict, said: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate(given)
    assert complaints(caught.value) == said


def test_how_a_process_ended() -> None:
    found = {code: ended_text(code) for code in (0, 3, -9, -37)}
    assert found == {
        0: "exit code 0",
        3: "exit code 3",
        -9: "killed by SIGKILL",
        -37: "killed by signal 37",
    }
    assert [counted(n, "process") for n in (1, 2)] == ["1 process", "2 processes"]
    assert [counted(n, "shard") for n in (1, 0)] == ["1 shard", "0 shards"]
