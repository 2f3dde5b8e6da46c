"""Renders chat templates in a process of its own: a template is a stranger's program.

The process (template_worker.py) has the sandbox of jinja2, and the kernel limits its memory to
1 GiB, its processor time to `MAX_SECONDS` a batch, and its files: it can write none. This side
limits the bytes that it reads and the time that it waits. macOS does not limit the memory.

A batch that exceeds a limit is rendered again, one conversation at a time, to find the one that
does. The process ends with this one, which closes its input.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Event, Lock, Timer
from typing import Any

import jinja2
import markupsafe

MAX_SECONDS = 6
"""Seconds of processor time that a batch may take."""
MAX_BYTES, SHARE = 1 << 24, 50
"""Bytes that a batch may write, and more for each byte of its conversations."""
MAX_SOURCE = 1 << 18
"""Characters that a template may have."""
_MAX_WAIT_S = 90.0
"""Seconds that a batch may take on a busy machine."""
BATCH, _BATCH_BYTES = 64, 1 << 20
"""Conversations of a batch, and their bytes if there is more than one."""
_START = "import sys; sys.path += sys.argv[1:]; from template_worker import main; main()"


@dataclass(eq=False)
class Fault(Exception):
    """Why there is no text.

    Attributes:
        kind: "conversation": the template refuses this one; "syntax": it is no template;
            "refused": it exceeds a limit, or does what a template must not.
        line: of the template, with "syntax".
    """

    kind: str
    reason: str
    line: int | None = None


class _LimitError(Exception):
    """A batch exceeded a limit."""


class _Worker:
    """A process that renders batches, and is started again after one that exceeded a limit."""

    def __init__(self) -> None:
        self._lock, self._process = Lock(), None

    def render(self, source: bytes, chats: Sequence[bytes]) -> list[str | Fault]:
        """Return the results of a batch of JSON texts; raise a `_LimitError` at a limit."""
        head = b'{"seconds":%d,"source":%s,"chats":[' % (MAX_SECONDS, source)
        request = head + b",".join(chats) + b"]}\n"
        with self._lock:
            if self._process is None:
                self._process = _started()
            try:
                answers = json.loads(_exchange(self._process, request))
                results = [a if isinstance(a, str) else Fault(**a) for a in answers]
                for result in results:
                    if isinstance(result, Fault) and result.kind == "refused":
                        raise _LimitError(result.reason)
            except BaseException:  # what it may still write or keep belongs to no other batch
                process, self._process = self._process, None
                process.kill()
                with suppress(OSError):  # a request that was not sent
                    process.communicate()
                raise
        return results


def _started() -> subprocess.Popen[bytes]:
    packages = {str(Path(m.__file__).parents[1]): True for m in (jinja2, markupsafe)}  # type: ignore[arg-type]
    command = [sys.executable, "-ISB", "-c", _START, str(Path(__file__).parent), *packages]
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "TZ") if name in os.environ}
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd="/",
        env=kept,
        start_new_session=True,  # Ctrl-C is for this process
    )


def _exchange(process: subprocess.Popen[bytes], request: bytes) -> bytes:
    """Send a batch, and return the line that answers it."""
    assert process.stdin is not None
    assert process.stdout is not None
    most, is_late = MAX_BYTES + SHARE * len(request), Event()

    def end() -> None:
        is_late.set()  # before the answer's end, which the killed process's is
        process.kill()

    timer = Timer(_MAX_WAIT_S, end)
    timer.start()
    try:
        with suppress(BrokenPipeError):  # it ended: the code that it ended with is read below
            process.stdin.write(request)
            process.stdin.flush()
        answer = process.stdout.readline(most)
    finally:  # an interrupted process would wait for the timer
        timer.cancel()
    if answer.endswith(b"\n"):
        return answer
    if is_late.is_set():
        raise _LimitError(f"it takes more than {_MAX_WAIT_S:.0f} seconds")
    if len(answer) == most:
        raise _LimitError(f"it writes more than {most:,} bytes")
    code = process.wait()
    if code == -signal.SIGXCPU:
        raise _LimitError(f"it computes for more than {MAX_SECONDS} seconds")
    raise _LimitError(f"it ends its process (code {code}), as a lack of memory does")


@lru_cache(maxsize=1)
def _worker(_: int) -> _Worker:
    return _Worker()


def render_template(source: str, chats: Iterable[Mapping[str, Any]]) -> Iterator[str | Fault]:
    """Yield what a template writes for each of the chats, in order.

    Args:
        source: in Jinja.
        chats: the template's variables (JSON values by name); batches of them are read ahead.
    """
    if len(source) > MAX_SOURCE:
        yield from (Fault("refused", f"it has more than {MAX_SOURCE:,} characters") for _ in chats)
        return
    template, batch = _to_json(source), []
    for chat in map(_to_json, chats):
        if len(batch) == BATCH or (batch and sum(map(len, batch)) + len(chat) > _BATCH_BYTES):
            yield from _render_batch(template, batch)
            batch = []
        batch.append(chat)
    if batch:
        yield from _render_batch(template, batch)


def _render_batch(source: bytes, chats: Sequence[bytes]) -> Iterator[str | Fault]:
    try:
        # A forked process must not use the pipes and the lock of its parent.
        results = _worker(os.getpid()).render(source, chats)
    except _LimitError as error:
        results = [Fault("refused", str(error))] if len(chats) == 1 else []
    if results:
        yield from results
    else:
        for chat in chats:
            yield from _render_batch(source, [chat])


def _to_json(value: Any) -> bytes:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "surrogatepass")
