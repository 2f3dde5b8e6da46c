"""Shared by the verbs: the monitor, error messages and the output of reports.

Stdout has only the tables or the JSON that a verb prints; everything else goes to stderr.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text
from typer.core import TyperGroup

from draftlab.cli.plain_text import PlainConsole, echo_json
from draftlab.errors import UserError
from draftlab.progress import Monitor
from draftlab.signals import ENDING_SIGNALS, on_ending_signal
from draftlab.url_secrets import without_secrets

if TYPE_CHECKING:
    from draftlab.evaluate.results import Report
    from draftlab.run.stages import Status

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


class Verbs(TyperGroup):
    """The verbs; a mistake in a command's form is printed as other errors are."""

    def main(self, *args: Any, **options: Any) -> Any:
        try:
            _check_utf8(sys.argv[1:])
            code = super().main(*args, **(options | {"standalone_mode": False}))
        except typer.BadParameter.__bases__ as error:  # UsageError, which typer does not export
            if type(error).__name__ != "NoArgsIsHelpError":  # which has printed the help
                what = error.format_message().rstrip(".")
                verb = error.ctx.command_path if error.ctx else "draftlab"
                do = f"`{verb} --help` explains what it takes"
                _print_error(errors, UserError(what, where="command line", do=do))
            code = 2
        except UserError as error:
            _print_error(errors, error)
            code = 2
        sys.exit(code or 0)


class _Bar(Progress):
    """A progress bar with its detail below, where words have the room of whole lines."""

    def get_renderables(self) -> Iterator[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        for task in self.tasks:
            yield Text(task.fields["detail"])


def _check_utf8(arguments: Sequence[str]) -> None:
    """Check the arguments and the working folder, whose names reports and exports hold.

    Raises:
        UserError: one has bytes that are not UTF-8, of which Python makes surrogates.
    """
    for text in (*arguments, os.path.realpath(".")):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError(
                f"expected arguments and a working folder named in UTF-8, found {text!r}",
                where="command line",
                do="rename the file or folder",
            ) from None


class ConsoleMonitor(Monitor):
    """Prints lines and a progress bar on a terminal, and lines of progress into a log.

    Attributes:
        warnings: the printed lines that begin with "warning: ".
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
    """Yield a line for each stage of a plan, and one if the run would be refused.

    Args:
        force: whether stages with changed settings run again.
    """
    changed = (s.stage for s in statuses if s.state == "changed" and not s.stage.cheap)
    refused = None if force else next(changed, None)
    printed = set[str]()
    for status in statuses:
        # The settings of a stage are inputs of all later stages; each change is printed once.
        new = [
            f"{key} {in_run!r} → {in_recipe!r}"
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
        yield (
            f"  the run would be refused: --force runs {refused.name} and all later stages again; "
            "name=other starts a new run beside this one"
        )


def print_block(console: Console, title: str, text: Text) -> None:
    """Print a panel on a terminal, and unwrapped lines into a log."""
    if console.is_terminal:
        console.print(Panel(text, title=title, title_align="left", border_style="red"))
    else:
        console.print(Text(f"{title}: ").append_text(text), soft_wrap=True)


errors = PlainConsole(stderr=True)
# In a file or a pipe rich assumes 80 columns, too few for the tables of reports.
output = PlainConsole(
    width=None if (sys.stdout and sys.stdout.isatty()) or "COLUMNS" in os.environ else 110
)
monitor = ConsoleMonitor(errors)


DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
USER_ERRNOS = (*DISK_FULL, errno.EACCES, errno.EPERM, errno.EROFS)
KIND_ERRNOS = (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG)
RESUMES = "the same command keeps what is finished and goes on"
STARTS_OVER = "nothing was written, and the same command starts over"


def _is_importing() -> bool:
    """Return whether the main thread imports a module."""
    frame = sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
    return False


@contextmanager
def _ended_by_signals(monitor: ConsoleMonitor, interrupted: str) -> Iterator[None]:
    """End the block at SIGINT with `KeyboardInterrupt`, at SIGTERM and SIGHUP with a line and
    `SystemExit`, 128 + their number.

    Libraries replace or ignore an exception that comes while they are imported, and go on for
    seconds. No work needs an end then, so that the process exits at once.
    """
    codes: list[int] = []

    def end(number: int) -> None:
        codes.append(128 + number)
        importing = _is_importing()
        if number == signal.SIGINT and not importing:
            raise KeyboardInterrupt
        monitor.close()
        if len(codes) == 1:
            name = "interrupted" if number == signal.SIGINT else signal.Signals(number).name
            monitor.console.print(f"{name}; {interrupted}")
        if importing:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(codes[0])
        raise SystemExit(codes[0])

    try:
        with on_ending_signal(end, (signal.SIGINT, *ENDING_SIGNALS)):
            yield
    except Exception:
        # Libraries in C replace an exception of a handler by one of their own.
        if not codes:
            raise
    if codes:
        raise KeyboardInterrupt if codes[0] == 128 + signal.SIGINT else SystemExit(codes[0])


@contextmanager
def guard(
    debug: bool, interrupted: str = RESUMES, monitor: ConsoleMonitor = monitor
) -> Iterator[None]:
    """Print a `UserError` and exit with code 2; print other errors and exit with code 1.

    SIGTERM and SIGHUP end the process with a line and 128 + their number.

    Args:
        debug: whether to print the traceback.
        interrupted: the effect of an interruption, for the message.
        monitor: prints to its console, after its progress bar is removed.
    """
    console = monitor.console
    try:
        with _ended_by_signals(monitor, interrupted):
            yield
    except (typer.Exit, typer.Abort, SystemExit):
        raise
    except BaseException as error:
        monitor.close()
        if debug:
            console.print(Text(traceback.format_exc()), soft_wrap=True)
        if isinstance(error, KeyboardInterrupt):
            console.print(f"interrupted; {interrupted}")
            raise typer.Exit(130) from None
        if explained := _explained(error, interrupted):
            _print_error(console, explained)
            raise typer.Exit(2) from None
        if not isinstance(error, Exception):
            raise
        text = Text(f"{type(error).__name__}: {error}\nThis is a bug in draftlab.")
        if not debug:
            text.append(" Repeat the command with --debug for the traceback, and report it.")
        print_block(console, "internal error", text)
        raise typer.Exit(1) from None
    finally:
        monitor.close()
        monitor.warnings.clear()


def _explained(error: BaseException, interrupted: str) -> UserError | None:
    """Return an error that a user can correct; None: it is a bug."""
    if isinstance(error, UserError):
        return error
    filename = getattr(error, "filename", None)
    if (number := _error_number(error)) in USER_ERRNOS:
        what = f"expected to write a file, found: {os.strerror(number)}"
        where = filename or f"a file under {Path.cwd()} or of the cache"
        do = "free some disk" if number in DISK_FULL else "let this user write there"
        return UserError(what, where=where, do=f"{do}; {interrupted}")
    if number in KIND_ERRNOS:
        what = f"expected a file or folder of another kind, found: {os.strerror(number)}"
        do = f"remove it, or name another one; {interrupted}"
        return UserError(what, where=filename or Path.cwd(), do=do)
    if type(error).__name__ == "PanicException":  # of Rust, which no class of Python names
        what = f"a library in Rust failed, probably the tokenizer on a text: {error}"
        do = "leave the text out, or mend the expression that splits texts in tokenizer.json"
        return UserError(what, do=f"{do}; {interrupted}")
    return None


def _error_number(error: BaseException) -> int:
    """Return the number of an error of the operating system; 0: it is another one.

    Safetensors, which transformers and others write by themselves, has it in the text.
    """
    if isinstance(error, OSError):
        return error.errno or 0
    in_text = re.search(r"I/O error: .*\(os error (\d+)\)", str(error))
    return int(in_text[1]) if in_text and type(error).__name__ == "SafetensorError" else 0


def _print_error(console: Console, error: UserError) -> None:
    text = Text(error.what)
    if error.where:
        text.append(f"\nwhere: {error.where}", style="dim")
    if error.do:
        text.append(f"\ndo: {error.do}", style="bold")
    print_block(console, "error", text)


def show_report(report: Report, as_json: bool, path: Path) -> None:
    """Print a report's table or its JSON, with all warnings, and the path of its HTML page."""
    if as_json:
        echo_json(path.read_text(encoding="utf-8"))
    else:
        from draftlab.report import print_report

        print_report(report, output, [w.removeprefix("warning: ") for w in monitor.warnings])
    monitor.say(f"report: {path.with_name('report.html').resolve()}")
