"""Starting the processes of a training on one machine: `draftlab train RECIPE --gpus N`.

What torchrun and accelerate launch do as well; this one prints a line for a process that crashed
and says where its log is. Rank 0 has the terminal, the others write to logs that stay if one fails.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from draftlab.formatting import exit_text
from draftlab.progress import Monitor

DRAFTLAB = (sys.executable, "-m", "draftlab.cli")
POLL_S = 0.2
NO_CRASH = (0, 130, 128 + signal.SIGTERM)
"""Exit codes of processes that ended well, or were asked to end."""
GRACE_S = 5.0
"""How long processes that were told to stop, or that lost one of them, may take to end."""


def launch(
    arguments: Sequence[str], count: int, monitor: Monitor, *, program: Sequence[str] = DRAFTLAB
) -> int:
    """Runs `draftlab ARGUMENTS` in `count` processes that find each other; waits for them.

    When one fails, the others are ended.

    Returns:
        The exit code: 0, or that of the process that failed first.
    """
    logs = Path(tempfile.mkdtemp(prefix="draftlab-ranks-"))
    processes: list[subprocess.Popen[bytes]] = []
    code, before = 128 + signal.SIGTERM, signal.signal(signal.SIGTERM, _leave)
    try:
        command, port = [*program, *arguments], _free_port()
        for rank in range(count):
            processes.append(_start(command, rank, count, port, logs))
        code = _await(processes, logs, monitor)
    except KeyboardInterrupt:  # the terminal has told the others, too
        _settle(processes)
        code = 130
    finally:
        _end(processes)
        signal.signal(signal.SIGTERM, before)
        _tidy(logs, keep=code not in NO_CRASH)
    return code


def _tidy(logs: Path, *, keep: bool) -> None:
    """Removes logs, or those alone that are empty."""
    for log in logs.iterdir():
        if not (keep and log.stat().st_size):
            log.unlink()
    if not any(logs.iterdir()):
        logs.rmdir()


def _leave(_signal: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + signal.SIGTERM)


def _start(
    command: list[str], rank: int, count: int, port: int, logs: Path
) -> subprocess.Popen[bytes]:
    threads = max(1, (os.cpu_count() or 1) // count)
    environment = {
        "OMP_NUM_THREADS": str(threads),  # whoever sets it keeps it
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
    }
    if rank == 0:
        return subprocess.Popen(command, env=environment)
    with open(_log(logs, rank), "wb") as log:
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )


def _log(logs: Path, rank: int) -> Path:
    return logs / f"rank-{rank}.log"


def _await(processes: list[subprocess.Popen[bytes]], logs: Path, monitor: Monitor) -> int:
    """Waits for all processes, or for the first that fails, of which it tells."""
    while True:
        codes = [process.poll() for process in processes]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            break
        if None not in codes:
            return 0
        time.sleep(POLL_S)
    # The others soon fail for want of it; who was found first is the one that tells why.
    _settle(processes)
    for rank in failed:
        code = codes[rank]
        how = exit_text(code)
        said = _last_line(_log(logs, rank)) if rank else ""
        if said:
            monitor.say(f"rank {rank} failed: {how}; its log: {_log(logs, rank)}; it ends: {said}")
        elif rank or code < 0:  # with an exit code rank 0 has said why
            monitor.say(f"rank {rank} failed: {how}, without a word")
    return 128 - codes[failed[0]] if codes[failed[0]] < 0 else codes[failed[0]]


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _settle(processes: list[subprocess.Popen[bytes]]) -> None:
    """Gives the processes time to end on their own."""
    until = time.monotonic() + GRACE_S
    while time.monotonic() < until and any(p.poll() is None for p in processes):
        time.sleep(POLL_S)


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.terminate()
    _settle(processes)
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
