"""Results that are saved part by part, and what a program needs."""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from draftlab.errors import UserError
from tests.helpers.drivers import load

measurements = load("measurements")


def parts(file: Path, minutes: float | None = None, **conditions: Any) -> Any:
    return measurements.Measurements(Namespace(results=file, minutes=minutes), conditions)


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


def test_no_part_begins_when_the_time_is_up(tmp_path: Path) -> None:
    late = parts(tmp_path / "results.json", minutes=0)
    assert late.measure("one", pytest.fail) is None
    assert late.left_out == ["one"]
    assert not (tmp_path / "results.json").exists()


def test_all_that_is_lacking_is_said_at_once(tmp_path: Path) -> None:
    measurements.require(modules=["json"], disk=(tmp_path, 1.0))
    with pytest.raises(UserError) as error:
        measurements.require(modules=["json", "no_such_module"], gpus=99, disk=(tmp_path, 1e18))
    for text in ("No module named 'no_such_module'", "99 GPUs, found 0", "1000000000.0 GB"):
        assert text in str(error.value)


def test_a_child_in_another_folder_imports_the_same_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site/only_here.py").write_text("")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "site")
    program = [sys.executable, "-c", "import only_here, draftlab"]
    environment = measurements.child_environment()
    subprocess.run(program, cwd=tmp_path / "elsewhere", env=environment, check=True)
