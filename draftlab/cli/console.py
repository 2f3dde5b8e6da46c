"""Shared by the verbs: options, the monitor and the output of reports.

Stdout has only the tables or the JSON that a verb prints; everything else goes to stderr.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from draftlab.cli.plain_text import PlainConsole, echo_json
from draftlab.formatting import value_text
from draftlab.progress import Monitor
from draftlab.url_secrets import without_secrets

if TYPE_CHECKING:
    from draftlab.evaluate.results import Report
    from draftlab.run.stage_status import Status

Json = Annotated[
    bool, typer.Option("--json", help="Print report.json on stdout instead of the table.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Print the traceback of an error.")]
RunOption = Annotated[
    str | None,
    typer.Option(
        "--run", help="Run whose head it is, by name or path; else the latest.", metavar="RUN"
    ),
]
HeadOption = Annotated[
    str | None,
    typer.Option(help='Head folder instead of a run; "reference" is the built-in head.'),
]
TargetOption = Annotated[
    str | None,
    typer.Option(
        help='Target: a folder, a GGUF file, a Hub id or "embedded"; by default that of the run.'
    ),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run code that comes with the target of --target."),
]

PROGRESS_INTERVAL_S = 15.0  # between lines of progress in a log


class _Bar(Progress):
    """A progress bar with its detail below, where words have the room of whole lines."""

    def get_renderables(self) -> Iterator[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        for task in self.tasks:
            yield Text(task.fields["detail"])


class ConsoleMonitor(Monitor):
    """Prints lines and a progress bar on a terminal, and lines of progress into a log; keeps
    warnings.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.warnings: list[str] = []
        self._bars = _Bar(
            TextColumn("{task.description}", markup=False, table_column=Column(overflow="fold")),
            BarColumn(bar_width=12),
            TextColumn("{task.completed:,.0f}/{task.total:,.0f}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._task: tuple[str, TaskID] | None = None
        self._last = 0.0
        self._first: tuple[str, float, float] | None = None

    def say(self, line: str) -> None:
        line = without_secrets(line)
        if line.startswith("warning: "):
            self.warnings.append(line)
        self.console.print(Text(line), soft_wrap=not self.console.is_terminal)

    def progress(self, stage: str, done: float, total: float, detail: str = "") -> None:
        if not self.console.is_terminal:
            now = time.monotonic()
            left = self._time_left(stage, done, total, now)
            if done >= total or now - self._last > PROGRESS_INTERVAL_S:
                self._last = now
                self.say(" ".join(filter(None, (_count(stage, done, total), left, detail))))
            return
        if self._task is None or self._task[0] != stage:
            self.close()
            self._bars.start()
            task = self._bars.add_task(stage, total=total, completed=done, detail=detail)
            self._task = (stage, task)
        self._bars.update(self._task[1], completed=done, total=total, detail=detail)
        if done >= total:
            self.close()
            self.say(f"{_count(stage, done, total)} {detail}".rstrip())

    def _time_left(self, stage: str, done: float, total: float, now: float) -> str:
        """Return how long a stage still takes at its speed since its first report, or ""."""
        if self._first is None or self._first[0] != stage or done < self._first[1]:
            self._first = (stage, done, now)
        _, first, began = self._first
        if done <= first or done >= total:
            return ""
        seconds = (total - done) * (now - began) / (done - first)
        return f"({timedelta(seconds=round(seconds))} left)"

    def close(self) -> None:
        """Remove the progress bar."""
        if self._task is not None:
            self._bars.remove_task(self._task[1])
            self._bars.stop()
            self._task = None


def _count(stage: str, done: float, total: float) -> str:
    return f"{stage}: {done:,.0f}/{total:,.0f}"


def plan_lines(statuses: Sequence[Status], *, force: bool) -> Iterator[str]:
    """Yield a line for each stage of a plan, and one if the run, without --force, would be
    refused.
    """
    changed = (s.stage for s in statuses if s.state == "changed" and not s.stage.cheap)
    refused = None if force else next(changed, None)
    printed = set[str]()
    for status in statuses:
        # The settings of a stage are inputs of all later stages; each change is printed once.
        new = [
            f"{key} {value_text(in_run)} → {value_text(in_recipe)}"
            for key, (in_run, in_recipe) in status.changes.items()
            if key not in printed
        ]
        printed |= status.changes.keys()
        reason = f"settings changed: {', '.join(new)}" if new else "an earlier stage changed"
        texts = {
            "done": "there, nothing to do",
            "unneeded": "not there, and not needed",
            "missing": "would run",
            "unfinished": "would continue",
            "changed": reason if refused else f"would run again, {reason}",
        }
        if status.elsewhere and status.state == "unfinished":
            texts["unfinished"] = f"would be refused: {status.elsewhere}"
        path = status.missing_input
        note = f"; it needs {path}, which is not there yet" if path else ""
        yield f"  {status.stage.name:8} {texts[status.state]}{note}"
    if refused:
        yield f"  the run would be refused: --force runs {refused.name} and all later stages again;"
        yield "    name=other starts a new run beside this one"


errors = PlainConsole(stderr=True)
# In a file or a pipe rich assumes 80 columns, too few for the tables of reports.
output = PlainConsole(
    width=None if (sys.stdout and sys.stdout.isatty()) or "COLUMNS" in os.environ else 110
)
monitor = ConsoleMonitor(errors)


def show_report(report: Report, as_json: bool, path: Path) -> None:
    """Print a report's table or its JSON, with all warnings, and the path of its HTML page."""
    if as_json:
        echo_json(path.read_text(encoding="utf-8"))
    else:
        from draftlab.report.console import print_sections
        from draftlab.report.sections import sections

        said = [w.removeprefix("warning: ") for w in dict.fromkeys(monitor.warnings)]
        print_sections(sections(report, said=said), output)
    monitor.say(f"report: {path.with_name('report.html').resolve()}")
