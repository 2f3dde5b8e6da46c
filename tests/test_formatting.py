"""Texts of numbers, exit codes and installations."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from draftlab.formatting import (
    EXTRAS,
    count_text,
    exit_text,
    parse_size,
    pip_install,
    rounded_text,
    size_text,
    value_text,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [("20GB", 20 * 10**9), ("3 kB", 3000), ("7b", 7), ("1.5 TB", 15 * 10**11), (" 2000 ", 2000)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GB", "0GB", "-1GB", "1.2.3GB", "1e9", "5 GiB", f"{9**400}GB"]
)
def test_texts_that_are_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="expected a size such as 200GB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (size_text(0), "0 B"),
        (size_text(999.7), "1,000 B"),
        (size_text(1020), "1.02 kB"),
        (size_text(3_295_000), "3.29 MB"),
        (size_text(999.9e9), "1,000 GB"),
        (size_text(4.1234e15), "4,120 TB"),
        (rounded_text(0.07644, 3), "0.0764"),
        (rounded_text(187.3, 2), "190"),
        (rounded_text(123_456_789, 3), "123,000,000"),
        (rounded_text(0, 3), "0"),
        (exit_text(-9), "killed by SIGKILL"),
        (exit_text(-37), "killed by signal 37"),
        (count_text(1, "process"), "1 process"),
        (count_text(2, "process"), "2 processes"),
        (value_text("2-82b2018d88930671715d95469ac9308f-c5fada2474d1"), "'2-82b2018d8893…'"),
        (value_text([0.5, "facade"]), "[0.5, 'facade']"),
    ],
)
def test_texts_of_numbers(text: str, expected: str) -> None:
    assert text == expected


def test_extras_are_installed_by_the_packages_that_pyproject_names() -> None:
    """No index has draftlab, so that pip cannot install its extras outside of a checkout."""
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    del extras["dev"]
    assert extras.keys() == EXTRAS.keys()
    for extra, packages in extras.items():
        assert packages == [EXTRAS[extra]] or packages[0].startswith(f"{EXTRAS[extra]}>=")
        assert EXTRAS[extra] in pip_install(extra)
