"""SIGTERM and SIGHUP, by which schedulers and closed terminals end a process."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def on_ending_signal(handle: Callable[[int], None]) -> Iterator[None]:
    """Call `handle` with the number of each ending signal that arrives in the block.

    A signal that the process ignores stays ignored, as under nohup. Only the main thread of a
    process can handle signals; in other threads nothing changes.
    """
    former = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.getsignal(number) for number in ENDING_SIGNALS}
        former = {number: old for number, old in handlers.items() if old != signal.SIG_IGN}
    for number in former:
        signal.signal(number, lambda number, _: handle(number))
    try:
        yield
    finally:
        for number, old in former.items():
            signal.signal(number, old)
