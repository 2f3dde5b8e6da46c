"""Start the processes of `draftlab train RECIPE --gpus N` on this machine.

Like torchrun and accelerate launch, but it prints one line with the log of a process that failed.
Rank 0 writes to the terminal; the others write logs, which are kept if a process fails.
"""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from draftlab.formatting import exit_text
from draftlab.progress import Monitor
from draftlab.signals import ENDING_SIGNALS, on_ending_signal, worker_environment

DRAFTLAB = (sys.executable, "-m", "draftlab")
POLL_S = 0.2
NO_FAILURE = (0, 130, *(128 + number for number in ENDING_SIGNALS))
"""Exit codes of processes that succeeded or were interrupted."""
GRACE_S = 5.0
"""How long processes may take to end after an interruption, or after one of them failed."""


def launch(
    arguments: Sequence[str],
    count: int,
    monitor: Monitor,
    *,
    program: Sequence[str] = DRAFTLAB,
    environment: Mapping[str, str] | None = None,
) -> int:
    """Run `draftlab ARGUMENTS` in `count` processes that can connect, with further variables; wait
    for them.

    If a process fails, the others are terminated. SIGTERM and SIGHUP are passed on to all, which
    then write a checkpoint; a second one ends them at once. Returns 0, or the exit code of the
    process that failed first.
    """
    logs = Path(tempfile.mkdtemp(prefix="draftlab-ranks-"))
    processes: list[subprocess.Popen[bytes]] = []
    code = 1
    with on_ending_signal(_exit):
        try:
            command, port = [*program, *arguments], _free_port()
            for rank in range(count):
                processes.append(_start(command, rank, count, port, logs, environment or {}))
            code = _wait(processes, logs, monitor)
        except KeyboardInterrupt:  # the terminal sent it to all processes
            _wait_for_exit(processes)
            code = 130
        except SystemExit as ended:
            code = int(ended.code or 0)
            for process in processes:
                process.send_signal(code - 128)
            with suppress(SystemExit):
                _wait_for_exit(processes, math.inf)
            raise
        finally:
            _end(processes)
            _remove_logs(logs, keep=code not in NO_FAILURE)
    return code


def _remove_logs(logs: Path, *, keep: bool) -> None:
    """Delete the logs; with `keep` only empty ones."""
    for log in logs.iterdir():
        if not (keep and log.stat().st_size):
            log.unlink()
    if not any(logs.iterdir()):
        logs.rmdir()


def _exit(number: int) -> NoReturn:
    raise SystemExit(128 + number)


def _start(
    command: list[str],
    rank: int,
    count: int,
    port: int,
    logs: Path,
    variables: Mapping[str, str],
) -> subprocess.Popen[bytes]:
    threads = max(1, (os.cpu_count() or 1) // count)
    environment = {
        "OMP_NUM_THREADS": str(threads),  # a value that the user has set is kept
        **os.environ,
        **variables,
        **worker_environment(),
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


def _wait(processes: list[subprocess.Popen[bytes]], logs: Path, monitor: Monitor) -> int:
    """Wait for all processes; report the first that fails. Return the exit code."""
    while True:
        codes = [process.poll() for process in processes]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            break
        if None not in codes:
            return 0
        time.sleep(POLL_S)
    # The others soon fail as well, since they cannot connect; only the first is reported.
    _wait_for_exit(processes)
    for rank in failed:
        code = codes[rank]
        line = _last_line(_log(logs, rank)) if rank else ""
        failure = f"rank {rank} failed: {exit_text(code)}"
        if line:
            monitor.say(f"{failure}; its log: {_log(logs, rank)}; the last line: {line}")
        elif rank or code < 0:  # an exit code of rank 0 follows its own message
            monitor.say(f"{failure}, without a message")
    return 128 - codes[failed[0]] if codes[failed[0]] < 0 else codes[failed[0]]


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _wait_for_exit(processes: list[subprocess.Popen[bytes]], seconds: float | None = None) -> None:
    """Wait until all processes have ended, for at most so many seconds (None: GRACE_S)."""
    until = time.monotonic() + (GRACE_S if seconds is None else seconds)
    while time.monotonic() < until and any(p.poll() is None for p in processes):
        time.sleep(POLL_S)


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.terminate()
    _wait_for_exit(processes)
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
