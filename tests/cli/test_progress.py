"""The progress of a stage: on a narrow terminal, in a log, and as a number of stages."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from draftlab.cli import console as console_module
from draftlab.cli.console import ConsoleMonitor
from draftlab.evaluate.workload import _title
from tests.helpers.small_run import PRINTED, finished

TRAINING = (
    "12,459 tokens/s (8,211 with loss) · loss 9.064 · α 0.529 · MFU 41% · data 11.7% of the time"
    " · 14.6 GiB"
)


@pytest.mark.parametrize("width", [80, 60])
def test_bar_count_and_remaining_time_are_visible_on_a_narrow_terminal(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=width, color_system=None)
    monitor = ConsoleMonitor(console)
    for step in (100, 4_400, 5_000):
        monitor.progress("train on the first of two machines", step, 20_000, TRAINING)
        monitor._bars.refresh()
    lines = [
        line.strip() for line in re.split(r"[\r\n]|\x1b\[[0-9?]*[A-Za-z]", file.getvalue()) if line
    ]
    monitor.close()
    number = next(i for i, line in enumerate(lines) if "5,000/20,000" in line)
    bar = r"train on .* [━╸╺ ]{12} 5,000/20,000 +(-:--:--|\d+:\d\d:\d\d)"
    assert re.fullmatch(bar, lines[number])
    detail = " ".join(lines[number + 1 :])
    assert TRAINING in " ".join(detail.split())
    assert max(map(len, lines)) <= width
    assert " 0/20,000" not in file.getvalue()


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


def test_titles_of_progress_are_plain_words() -> None:
    assert _title("timing", "draftlab", "T = 0, batch 1") == "timing T = 0, batch 1"
    assert _title("timing", "vllm", "T = 0, batch 1") == "timing with vllm, T = 0, batch 1"
