"""`draftlab serve`."""

from __future__ import annotations

import json
from pathlib import Path
from shlex import join, quote
from typing import Annotated

import typer

from draftlab.cli.console import Debug, monitor
from draftlab.cli.errors import guard
from draftlab.cli.plain_text import echo
from draftlab.errors import UserError
from draftlab.servers.server_counters import PROGRAMS


def serve(
    head: Annotated[
        str,
        typer.Argument(help="Run, by name or path, or the folder of an export.", metavar="HEAD"),
    ],
    program: Annotated[
        str, typer.Option("--with", help="vllm, sglang or llamacpp, which you have installed.")
    ],
    more: Annotated[
        list[str] | None,
        typer.Argument(help="Options of the program, behind --.", metavar="-- OPTION…"),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="The target: a folder, a Hub id or a GGUF file; by default that of the export."
        ),
    ] = None,
    k: Annotated[
        int | None, typer.Option("--k", help="Drafts a step; by default the export's.", min=1)
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            help="Files of `draftlab bench` at servers of several K, whose fastest K by load the "
            "server gets.",
            metavar="FILE,…",
        ),
    ] = None,
    port: Annotated[int, typer.Option(help="Port on this machine.", min=1, max=65535)] = 8000,
    debug: Debug = False,
) -> None:
    """Start a server with an export, and print how to ask and to measure it; Ctrl-C ends it.

    DRAFTLAB_VLLM_PYTHON and DRAFTLAB_SGLANG_PYTHON name the Python that has the
    program, LLAMA_CPP the folder of llama.cpp.
    """
    with guard(debug, "the server was ended"):
        if program not in PROGRAMS:  # before torch is imported
            what = f"expected a program out of {', '.join(PROGRAMS)}, found {program!r}"
            raise UserError(what, where="--with", do="name one of these")
        if schedule and program == "llamacpp":
            what = "expected no schedule, since llama.cpp reads no drafts by load; found one"
            raise UserError(what, where="--schedule", do="leave it out")
        from draftlab.run.serve import plan_server
        from draftlab.servers.server_process import ServerProcess

        files = [Path(file).expanduser() for file in (schedule or "").split(",") if file]
        planned = plan_server(head, program, target, k, files, port, more or ())
        monitor.say(f"serve: {join(planned.command)}")
        with ServerProcess(planned.name, planned.command, port) as server:
            monitor.say(f"serve: its log is {server.log}")
            model = server.wait_until_ready(monitor.say)
            message = {"role": "user", "content": "Hello"}
            body = json.dumps({"model": model, "messages": [message], "max_tokens": 64})
            echo(
                f"curl {server.url}/v1/chat/completions -H 'Content-Type: application/json' "
                f"-d {quote(body)}"
            )
            echo(f"draftlab bench {server.url} {planned.bench}")
            monitor.say("serve: Ctrl-C ends the server")
            server.wait()
