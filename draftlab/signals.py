"""SIGTERM and SIGHUP, which end a process; workers that end with the one that started them."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


PARENT = "DRAFTLAB_PARENT"
"""Environment variable with the id of the process that starts a worker."""
_POLL_S = 1.0
_AGAIN_S = 0.01


def worker_environment() -> dict[str, str]:
    """Return the variable for a child process that should not outlive this one."""
    return {PARENT: str(os.getpid())}


def end_with_parent() -> None:
    """Have this process end when the one that started it as a worker has ended.

    A killed process cannot end its workers, which would go on using their GPUs. They get SIGTERM,
    on which a training writes a checkpoint. Without `worker_environment` nothing happens.
    """
    if parent := int(os.environ.pop(PARENT, "0")):
        end_with(parent)


def end_with(parent: int) -> None:
    """Have this process end when its parent, whose id is given, has ended."""
    threading.Thread(target=_wait_for_end, args=(parent,), daemon=True).start()


def _wait_for_end(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    os.kill(os.getpid(), signal.SIGTERM)


_handlers_of_threads: list[Callable[[int], None]] = []


def deliver_ending_signal(number: int) -> bool:
    """Hand an ending signal of another process to the threads that handle one now.

    Returns:
        Whether there is such a thread, that is a block of `on_ending_signal` in it.
    """
    for handle in (handlers := [*_handlers_of_threads]):
        handle(number)
    return bool(handlers)


@contextmanager
def on_ending_signal(
    handle: Callable[[int], None], signals: Collection[int] = ENDING_SIGNALS
) -> Iterator[None]:
    """Call `handle` with the number of each of some signals that arrives in the block.

    A signal that the process ignores stays ignored, as under nohup. Only the main thread of a
    process receives signals; a block in another thread gets those of `deliver_ending_signal`.
    Python prints and drops an exception in `__del__`. Where a signal's arrival drops the one of
    `handle`, the signal is sent again a moment later.
    """
    if threading.current_thread() is not threading.main_thread():
        _handlers_of_threads.append(handle)
        try:
            yield
        finally:
            _handlers_of_threads.remove(handle)
        return
    handlers = {number: signal.getsignal(number) for number in signals}
    former = {number: old for number, old in handlers.items() if old != signal.SIG_IGN}
    received: list[int] = []

    def receive(number: int, _: object) -> None:
        received.append(number)
        handle(number)

    def send_again() -> None:
        if received:
            os.kill(os.getpid(), received[-1])

    def dropped(exception: sys.UnraisableHookArgs) -> None:
        if received and isinstance(exception.exc_value, SystemExit | KeyboardInterrupt):
            threading.Timer(_AGAIN_S, send_again).start()
        else:
            former_hook(exception)

    former_hook, sys.unraisablehook = sys.unraisablehook, dropped
    for number in former:
        signal.signal(number, receive)
    try:
        yield
    finally:
        received.clear()
        sys.unraisablehook = former_hook
        for number, old in former.items():
            signal.signal(number, old)
