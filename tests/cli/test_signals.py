"""Signals end a command with one line, in the main thread and in others."""

from __future__ import annotations

import io
import signal
import threading
import time

import pytest
from rich.console import Console

from draftlab.cli.console import ConsoleMonitor
from draftlab.cli.errors import guard
from draftlab.errors import UserError
from draftlab.signals import ENDING_SIGNALS, deliver_ending_signal, on_ending_signal


@pytest.mark.parametrize("number", ENDING_SIGNALS)
def test_a_signal_ends_the_process_with_a_line(number: signal.Signals) -> None:
    console = Console(file=io.StringIO(), width=100)
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as ended, guard(False, monitor=ConsoleMonitor(console)):
        signal.raise_signal(number)
    assert ended.value.code == 128 + number
    line = f"{number.name}; the same command keeps what is finished and goes on\n"
    assert console.file.getvalue() == line
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("error", [UserError("expected x", do="y"), TypeError("no shape"), None])
def test_a_signal_whose_exception_a_library_replaces_ends_the_process(
    error: Exception | None,
) -> None:
    """As torch does if the signal comes while it reads a tensor."""

    def library() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        except SystemExit:
            if error is not None:
                raise error from None

    console = Console(file=io.StringIO(), width=100)
    with pytest.raises(SystemExit) as ended, guard(False, monitor=ConsoleMonitor(console)):
        library()
    assert ended.value.code == 128 + signal.SIGTERM
    assert console.file.getvalue().startswith("SIGTERM; the same")
    assert "error" not in console.file.getvalue()


def test_a_signal_during_a_deletion_ends_the_process() -> None:
    """Python prints and drops an exception that is raised in `__del__`."""

    class Deleted:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    console = Console(file=io.StringIO(), width=100)

    def work() -> None:
        Deleted()
        time.sleep(60)

    with pytest.raises(SystemExit) as ended, guard(False, monitor=ConsoleMonitor(console)):
        work()
    assert ended.value.code == 128 + signal.SIGTERM
    assert console.file.getvalue().count("SIGTERM; the same") == 1


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with on_ending_signal(lambda number: pytest.fail("handled")):
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_thread_gets_the_signals_of_another_process() -> None:
    """As a rank of Ray Train, which is no main thread, gets the driver's."""
    received: list[int] = []
    in_block, may_end = threading.Event(), threading.Event()

    def train() -> None:
        with on_ending_signal(received.append):
            in_block.set()
            may_end.wait(60)

    assert not deliver_ending_signal(signal.SIGTERM)
    thread = threading.Thread(target=train)
    thread.start()
    assert in_block.wait(60)
    assert deliver_ending_signal(signal.SIGHUP)
    may_end.set()
    thread.join()
    assert received == [signal.SIGHUP]
    assert not deliver_ending_signal(signal.SIGTERM)
