"""The progress of a stage: on a narrow terminal, in a log, and as a number of stages."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from draftlab.cli import console as console_module
from draftlab.cli.console import ConsoleMonitor
from tests.helpers.small_run import PRINTED, finished


def test_a_log_says_how_long_a_stage_still_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(console_module.time, "monotonic", lambda: now[0])
    console = Console(file=io.StringIO(), width=80)
    monitor = ConsoleMonitor(console)
    for stage, done in (("train", 500), ("train", 501), ("train", 520), ("eval", 1), ("eval", 2)):
        now[0] += 30
        monitor.progress(stage, done, 1000, "7 tokens/s")
    assert console.file.getvalue().splitlines() == [
        "train: 500/1,000 7 tokens/s",
        "train: 501/1,000 (4:09:30 left) 7 tokens/s",
        "train: 520/1,000 (0:24:00 left) 7 tokens/s",
        "eval: 1/1,000 7 tokens/s",
        "eval: 2/1,000 (8:19:00 left) 7 tokens/s",
    ]


def test_each_stage_says_which_of_how_many_it_is() -> None:
    said = re.findall(r"^stage .*$", (finished() / PRINTED).read_text(), re.MULTILINE)
    names = ("answers", "store", "head", "eval", "export")
    assert said == [f"stage {number} of 5: {name}" for number, name in enumerate(names, 1)]
