"""What the verbs share: the monitor, the error block, a report's output.

Everything for people goes to stderr, but for the tables a verb was asked for.
"""

from __future__ import annotations

import errno
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from draftlab.errors import UserError
from draftlab.progress import Monitor

if TYPE_CHECKING:
    from draftlab.evaluate.results import Report
    from draftlab.pipeline.run_folder import Status

Json = Annotated[
    bool, typer.Option("--json", help="Print report.json on stdout, and nothing else there.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]

QUIET_S = 15.0  # seconds between progress lines where there is no terminal


class ConsoleMonitor(Monitor):
    """Lines and progress bars on a terminal; plain lines now and then elsewhere."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TextColumn("{task.completed:,.0f}/{task.total:,.0f}"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[detail]}"),
            console=console,
            transient=True,
        )
        self._task: tuple[str, TaskID] | None = None
        self._last = 0.0

    def say(self, line: str) -> None:
        self.console.print(Text(line), soft_wrap=not self.console.is_terminal)

    def progress(self, stage: str, done: float, total: float, detail: str = "") -> None:
        if not self.console.is_terminal:
            now = time.monotonic()
            if done >= total or now - self._last > QUIET_S:
                self._last = now
                self.say(f"{stage}: {done:,.0f}/{total:,.0f} {detail}")
            return
        if self._task is None or self._task[0] != stage:
            self.close()
            self._bars.start()
            self._task = (stage, self._bars.add_task(stage, total=total, detail=detail))
        self._bars.update(self._task[1], completed=done, total=total, detail=detail)
        if done >= total:
            self.close()
            self.say(f"{stage}: {done:,.0f}/{total:,.0f} {detail}")

    def close(self) -> None:
        """Takes the bar away."""
        if self._task is not None:
            self._bars.remove_task(self._task[1])
            self._bars.stop()
            self._task = None


def plan_lines(statuses: Sequence[Status], *, force: bool) -> Iterator[str]:
    """What would happen to each stage, and to all if a changed one is refused.

    Args:
        force: whether stages whose settings changed are made again.
    """
    changed = (s.stage for s in statuses if s.state == "changed" and not s.stage.cheap)
    refused = None if force else next(changed, None)
    said = set[str]()
    for status in statuses:
        # What changed before a stage has changed for it, too: once is enough.
        new = [
            f"{key} {made!r} → {asked!r}"
            for key, (made, asked) in status.changes.items()
            if key not in said
        ]
        said |= status.changes.keys()
        why = f"settings changed: {', '.join(new)}" if new else "what it is made from changed"
        says = {
            "done": "there, nothing to do",
            "unneeded": "not there, and not needed",
            "missing": "would run",
            "unfinished": "would go on where it stopped",
            "changed": why if refused else f"would run again, {why}",
        }
        lacks = f"; it needs {status.lacks}, which is not there yet" if status.lacks else ""
        yield f"  {status.stage.name:8} {says[status.state]}{lacks}"
    if refused:
        yield (
            f"  as it stands this is refused: --force makes {refused.name} and what follows again; "
            "name=other starts a new run beside this one"
        )


def block(console: Console, title: str, text: Text) -> None:
    """One readable block: a panel on a terminal, unbroken lines in a log."""
    if console.is_terminal:
        console.print(Panel(text, title=title, title_align="left", border_style="red"))
    else:
        console.print(Text(f"{title}: ").append_text(text), soft_wrap=True)


FULL = (errno.ENOSPC, errno.EDQUOT)
NOT_OURS = (*FULL, errno.EACCES, errno.EPERM, errno.EROFS)
RESUMES = "the same command goes on where it stopped"
STARTS_ANEW = "nothing was written, and the same command starts anew"


@contextmanager
def user_errors(
    monitor: ConsoleMonitor, *, debug: bool, interrupted: str = RESUMES
) -> Iterator[None]:
    """Turns a `UserError` into one block and exit code 2; others into a block and exit code 1.

    Args:
        monitor: whose console is printed to; its bars are taken away first.
        debug: also print the traceback.
        interrupted: what an interruption leaves.
    """
    console = monitor.console
    try:
        yield
    except UserError as error:
        monitor.close()
        _traceback(console, debug)
        _mistake(console, error)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        monitor.close()
        _traceback(console, debug)
        console.print(f"interrupted; {interrupted}")
        raise typer.Exit(130) from None
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:
        monitor.close()
        _traceback(console, debug)
        if isinstance(error, OSError) and error.errno in NOT_OURS:
            what = f"expected to write a file, found: {error.strerror}"
            where = error.filename or f"a file under {Path.cwd()}"
            need = "free some disk" if error.errno in FULL else "let this user write there"
            _mistake(console, UserError(what, where=where, do=f"{need}; {interrupted}"))
            raise typer.Exit(2) from None
        text = Text(f"{type(error).__name__}: {error}\nThis is a fault of draftlab, not yours.")
        if not debug:
            text.append(" The same command with --debug prints the traceback for a report.")
        block(console, "internal error", text)
        raise typer.Exit(1) from None
    finally:
        monitor.close()


def _mistake(console: Console, error: UserError) -> None:
    text = Text(error.what)
    if error.where:
        text.append(f"\nwhere: {error.where}", style="dim")
    if error.do:
        text.append(f"\ndo: {error.do}", style="bold")
    block(console, "error", text)


def _traceback(console: Console, debug: bool) -> None:
    if debug:
        console.print(Text(traceback.format_exc()), soft_wrap=True)


errors = Console(stderr=True)
# In a file or a pipe rich assumes 80 columns, in which a report's tables break names apart.
output = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 110)
monitor = ConsoleMonitor(errors)


def guard(debug: bool, interrupted: str = RESUMES) -> AbstractContextManager[None]:
    """`user_errors` of the command line's own monitor."""
    return user_errors(monitor, debug=debug, interrupted=interrupted)


def show(report: Report, as_json: bool, path: Path) -> None:
    """Prints a report's tables, or the file it lies in; then where the page is."""
    if as_json:
        typer.echo(path.read_text(encoding="utf-8"), nl=False)
    else:
        from draftlab.report import print_report

        print_report(report, output)
    monitor.say(f"report: {path.with_name('report.html')}")
