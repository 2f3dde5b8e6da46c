"""Results that are saved part by part, and what a program needs."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from draftlab.errors import UserError
from tests.helpers.drivers import load

measurements = load("measurements")


def parts(file: Path, **conditions: Any) -> Any:
    return measurements.Measurements(Namespace(results=file), conditions)


def test_a_part_is_measured_once_and_survives_what_comes_after_it(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    first = parts(file, k=3)
    assert first.measure("one", lambda: {"pair": (1, 2)}) == {"pair": [1, 2]}
    with pytest.raises(ZeroDivisionError):
        first.measure("two", lambda: 1 / 0)
    second = parts(file, k=3)
    assert second.measure("one", pytest.fail) == {"pair": [1, 2]}
    assert second.measure("two", lambda: 5) == 5
    assert parts(file, k=3).parts == {"one": {"pair": [1, 2]}, "two": 5}


def test_parts_belong_to_their_conditions(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    parts(file, k=3).measure("one", lambda: 1)
    assert parts(file, k=4).measure("one", lambda: 2) == 2
    assert parts(file, k=3).measure("one", pytest.fail) == 1
    assert parts(file, k=4).measure("one", pytest.fail) == 2


def test_all_that_is_lacking_is_said_at_once(tmp_path: Path) -> None:
    measurements.require(disk=(tmp_path, 1.0))
    with pytest.raises(UserError) as error:
        measurements.require(gpus=99, disk=(tmp_path, 1e18))
    for text in ("99 GPUs, found 0", "1000000000.0 GB"):
        assert text in str(error.value)
