"""A real llama.cpp with a draft head: conversion to GGUF, the server and its counters."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from draftlab.errors import UserError
from draftlab.export import gguf
from draftlab.progress import Monitor
from draftlab.servers.connection import Connection
from draftlab.servers.server_counters import parse_counters
from draftlab.servers.server_process import ServerProcess
from draftlab.servers.vllm_process import log_tail

START_S = 600.0
"""Time after which a server that does not answer is given up; a toy target takes a second."""


@dataclass(frozen=True)
class LlamaCpp:
    """The environment of setup_llamacpp.sh.

    Attributes:
        python: the interpreter of the converter.
    """

    python: Path

    @property
    def folder(self) -> Path:
        """The folder of the environment."""
        return self.python.parents[1]

    @property
    def converter(self) -> gguf.Converter:
        """llama.cpp's own converter."""
        return gguf.Converter(self.folder / "source" / gguf.SCRIPT, str(self.python))

    def program(self, name: str) -> Path:
        """Return a program of the build."""
        return self.folder / "build" / "bin" / name

    def version(self) -> str:
        """Return the package that the source came from."""
        stamp = (self.folder / ".draftlab-stamp").read_text()
        found = re.search(r"wanted: llama-cpp-python==(\S+)", stamp)
        return f"llama.cpp of llama-cpp-python {found[1] if found else '(unknown)'}"

    def convert_target(self, target: Path, out: Path) -> Path:
        """Convert the target in float32; its tokenizer gets the name that an export's has."""
        wrapper = Path(gguf.__file__).with_name("gguf_wrapper.py")
        name = gguf.pre_tokenizer_name(target) or ""
        convert = [self.converter.python, str(wrapper), str(self.converter.script), name]
        self._run([*convert, str(target), "--outtype", "f32", "--outfile", str(out)])
        return out

    def convert_head(self, export: Path, target: Path) -> Path:
        """Return head.gguf of an export in float32."""
        return gguf.convert(self.converter, export, target, "float32", Monitor())

    def quantize(self, model: Path, out: Path, kind: str) -> Path:
        """Return a quantised copy; `kind` is Q4_K_M, for example."""
        self._run([str(self.program("llama-quantize")), str(model), str(out), kind])
        return out

    def _run(self, command: list[str]) -> None:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            raise UserError(f"{command[0]} failed:\n{(done.stdout + done.stderr)[-2000:]}")


@dataclass(frozen=True)
class Answer:
    """The server's answer to one prompt.

    Attributes:
        token_ids: generated tokens without a final stop token.
        stopped: whether a stop token ended the answer.
        draft_tokens, accepted: counters of its verify steps.
    """

    token_ids: tuple[int, ...]
    stopped: bool
    draft_tokens: int
    accepted: int


@dataclass(frozen=True)
class Server:
    """A running llama-server, one request at a time."""

    connection: Connection

    def complete(self, token_ids: tuple[int, ...], max_new_tokens: int) -> Answer:
        """Continue a prompt greedily."""
        body = {
            "prompt": list(token_ids),
            "n_predict": max_new_tokens,
            "temperature": 0.0,
            "samplers": ["temperature"],
            "cache_prompt": False,
            "return_tokens": True,
        }
        with self.connection.open("/completion", body, timeout_s=300) as opened:
            answer = json.loads(opened.read())
        timings = answer["timings"]
        return Answer(
            tuple(answer["tokens"]),
            answer["stop_type"] == "eos",
            timings.get("draft_n", 0),
            timings.get("draft_n_accepted", 0),
        )

    def counted(self, k: int) -> tuple[int, list[int]]:
        """Return the verify steps, and accepted drafts by position, of all prompts so far."""
        with self.connection.open("/metrics", timeout_s=30) as opened:
            counters = parse_counters(opened.read().decode())
        assert counters is not None
        accepted = [*counters.accepted_at, *[0] * k][:k]  # it names no position without any
        return counters.values.get("drafts", 0), accepted


@contextlib.contextmanager
def serving(
    llama: LlamaCpp, target: Path, head: Path, method: str, *, k: int, max_length: int
) -> Iterator[Server]:
    """Run a server with float32 caches and K drafts a step, whatever their probability.

    Args:
        method: of the head's family, such as "eagle3".

    Raises:
        UserError: the server did not start; the error has the end of its log.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = (
        f"--spec-type draft-{method} --spec-draft-n-max {k} --spec-draft-p-min 0 "
        "-ctk f32 -ctv f32 -ctkd f32 -ctvd f32 -fa off "
        f"-c {max_length} -np 1 -t 1 -td 1 --metrics --host 127.0.0.1 --port {port}"
    )
    program = llama.program("llama-server")
    command = [str(program), "-m", str(target), "-md", str(head), *options.split()]
    began = time.monotonic()

    def check_time(line: str) -> None:  # called again and again while the server loads
        if time.monotonic() - began > START_S:
            log = log_tail(server.log.read_text(errors="replace"))
            raise UserError(f"{line}; its log ends:\n{log}", do="raise START_S if it only loads")

    with ServerProcess("llama-server", command, port) as server:
        server.wait_until_ready(check_time)
        yield Server(Connection(server.url))
