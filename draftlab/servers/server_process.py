"""A server that the user has installed, as a process: its program, its start and its end."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path

from draftlab.errors import UserError
from draftlab.formatting import exit_text
from draftlab.servers.connection import Connection, served_card
from draftlab.servers.vllm_process import find_python, log_tail

LLAMA_CPP = "LLAMA_CPP"
"""Environment variable with llama.cpp's folder."""
_POLL_S, _SAY_S = 0.5, 30.0
"""Seconds between two looks at a server that loads, and between two lines about it."""
_GRACE_S = 20.0
"""Seconds that a server has to end its processes."""
_CALL_S = 5.0
"""Seconds that it has to say whether it is ready."""

_LIBC = ctypes.CDLL(None)  # loaded here, since a forked process should not load a library
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def find_server(program: str) -> list[str]:
    """Return the beginning of the command that starts vllm, sglang or llamacpp.

    The user's environment names it: a Python that has vLLM or SGLang (`find_python`), or
    llama-server in `LLAMA_CPP` or on the PATH.

    Raises:
        UserError: it is not installed.
    """
    if program == "vllm":
        return [str(find_python()), "-m", "vllm.entrypoints.cli.main", "serve"]
    if program == "sglang":
        return [str(find_python("sglang")), "-m", "sglang.launch_server"]
    folder = os.environ.get(LLAMA_CPP)
    places = [str(Path(folder).expanduser() / "build/bin")] if folder else []
    path = os.pathsep.join([*places, os.environ.get("PATH", os.defpath)])
    if found := shutil.which("llama-server", path=path):
        return [found]
    raise UserError(
        "expected llama.cpp's llama-server, found none on the PATH"
        + f" or in {LLAMA_CPP}={folder}" * bool(folder),
        do=f"build llama.cpp, and set {LLAMA_CPP} to its folder or the PATH to its programs",
    )


class ServerProcess:
    """A running server in a process group of its own; a context manager that ends the group.

    Args:
        name: of the program, for messages.
        command: what starts it, with its port.
        port: of this machine's loopback address, at which it will answer.

    Attributes:
        url: its address.
        log: file with its output; it is removed at the end unless the server failed.

    Raises:
        UserError: the port is taken, or the program cannot be started.
    """

    def __init__(self, name: str, command: Sequence[str], port: int) -> None:
        self.name, self.url = name, f"http://127.0.0.1:{port}"
        _check_free(port)
        descriptor, path = tempfile.mkstemp(prefix="draftlab-serve-", suffix=".log")
        self.log, self._failed = Path(path), False
        with os.fdopen(descriptor, "wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # The terminal's Ctrl-C is for draftlab, which then ends the group.
                start_new_session=True,
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
                # The working directory may have a vllm.py.
                env={**os.environ, "PYTHONSAFEPATH": "1"},
            )

    def wait_until_ready(self, say: Callable[[str], None]) -> str:
        """Wait until the server answers, and return its name of the model.

        Raises:
            UserError: it ended before; with the end of its output.
        """
        connection = Connection(self.url)
        began = said = time.monotonic()
        while not _is_healthy(connection):
            self._check_alive("before it answered")
            if time.monotonic() - said > _SAY_S:
                said = time.monotonic()
                say(f"serve: {self.name} has been loading for {said - began:.0f} s")
            time.sleep(_POLL_S)
        say(f"serve: {self.name} answers after {time.monotonic() - began:.0f} s")
        card = served_card(connection.ask("/v1/models")[0], None, where=self.url, do="")
        return card["id"] if card else "MODEL"

    def wait(self) -> None:
        """Wait for the server's end, which only a failure brings.

        Raises:
            UserError: it has ended; with the end of its output.
        """
        while True:
            self._check_alive("while it served")
            time.sleep(_POLL_S)

    def _check_alive(self, when: str) -> None:
        if (code := self._process.poll()) is None:
            return
        self._failed = True
        log = self.log.read_text(encoding="utf-8", errors="replace").strip()
        raise UserError(
            f"{self.name} ended {when} ({exit_text(code)}):\n{log_tail(log)}",
            where=self.log,
            do="the log above says why; options for the program follow after --",
        )

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._send(signal.SIGTERM)
            end = time.monotonic() + _GRACE_S
            while self._send(0) and time.monotonic() < end:
                time.sleep(0.1)
        finally:  # a second Ctrl-C ends the wait
            self._send(signal.SIGKILL)
            self._process.wait()
            if not self._failed:
                self.log.unlink(missing_ok=True)

    def _send(self, number: int) -> bool:
        """Send a signal to the group; return whether it has a process."""
        self._process.poll()  # a process that was waited for leaves the group
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
            return True
        return False


def _end_with_parent() -> None:
    """Have this process end when draftlab is gone, also after a SIGKILL."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _check_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise UserError(
                f"expected a free port, found that {port} cannot be used: {error.strerror}",
                where="--port",
                do="name another one, or stop the server that has it",
            ) from None


def _is_healthy(connection: Connection) -> bool:
    """Return whether a server has loaded its model."""
    with suppress(OSError, HTTPException), connection.open("/health", timeout_s=_CALL_S):
        return True
    return False
