"""How a verb ends: its errors as lines and exit codes, and the signals that end it."""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.panel import Panel
from rich.text import Text
from typer.core import TyperGroup

from draftlab.cli.console import ConsoleMonitor, errors, monitor
from draftlab.errors import UserError
from draftlab.signals import ENDING_SIGNALS, on_ending_signal

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
USER_ERRNOS = (*DISK_FULL, errno.EACCES, errno.EPERM, errno.EROFS)
KIND_ERRNOS = (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG)
RESUMES = "the same command keeps what is finished and goes on"
STARTS_OVER = "nothing was written, and the same command starts over"


class Verbs(TyperGroup):
    """The verbs; a mistake in a command's form is printed as other errors are."""

    def main(self, *args: Any, **options: Any) -> Any:
        try:
            _check_utf8(sys.argv[1:])
            code = super().main(*args, **(options | {"standalone_mode": False}))
        except typer.BadParameter.__bases__ as error:  # UsageError, which typer does not export
            if type(error).__name__ != "NoArgsIsHelpError":  # which has printed the help
                what = _mistake(error)
                verb = error.ctx.command_path if error.ctx else "draftlab"
                do = f"`{verb} --help` explains what it takes"
                _print_error(errors, UserError(what, where="command line", do=do))
            code = 2
        except UserError as error:
            _print_error(errors, error)
            code = 2
        sys.exit(code or 0)


def _mistake(error: Any) -> str:
    """Return what is wrong with a command's form; of a value of the wrong kind what was found."""
    from pydantic import ValidationError

    from draftlab.settings import describe_errors

    if isinstance(error.__cause__, ValidationError) and error.param:
        return describe_errors(error.__cause__, max(error.param.opts, key=len))
    return str(error.format_message()).rstrip(".")


def _check_utf8(arguments: Sequence[str]) -> None:
    """Raise a `UserError` if an argument or the working folder, whose names reports and exports
    hold, has bytes that are not UTF-8, of which Python makes surrogates.
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

    SIGTERM and SIGHUP end the process with a line and 128 + their number. Messages say what an
    interruption does (`interrupted`); `debug` adds the traceback.
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


def print_block(console: Console, title: str, text: Text) -> None:
    """Print a panel on a terminal, and unwrapped lines into a log."""
    if console.is_terminal:
        console.print(Panel(text, title=title, title_align="left", border_style="red"))
    else:
        console.print(Text(f"{title}: ").append_text(text), soft_wrap=True)
