"""What `draftlab serve` starts: an export, the program for it, and how it is then measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from draftlab.errors import UserError
from draftlab.evaluate.server_schedule import read_schedule, sglang_schedule
from draftlab.export.launch import LAUNCH, launch_arguments
from draftlab.files import write_json
from draftlab.recipe.recipe import RECIPE
from draftlab.run.folder import find_run
from draftlab.run.resolve import run_of
from draftlab.run.stages import REPORT, STAGES
from draftlab.servers.server_counters import PROGRAMS
from draftlab.servers.server_process import find_server

_COUNTERS = {"vllm": [], "sglang": ["--enable-metrics"], "llamacpp": ["--metrics"]}
"""Options with which the programs show their counters."""


@dataclass(frozen=True)
class PlannedServer:
    """A server that can be started.

    Attributes:
        name: of the program.
        command: what starts it.
        bench: options of `draftlab bench` that measure it, as typed.
    """

    name: str
    command: list[str]
    bench: str


def plan_server(
    name: str,
    program: str,
    target: str | None,
    k: int | None,
    schedule: Sequence[Path],
    port: int,
    more: Sequence[str],
) -> PlannedServer:
    """Return how a program serves the export of a run, or an export's folder.

    Args:
        name: a run, by name or path, or the export.
        target, k: see `launch_arguments`.
        schedule: files of `read_schedule`, whose largest K is the default of `k`. SGLang's form is
            written beside the first.
        more: options of the program's own, which come last and win.

    Raises:
        UserError: there is no such export, its target is not there, or the program is missing.
    """
    folder = _find_export(name, program).resolve()
    drafts = read_schedule(schedule) if schedule else ()
    if drafts and k is None:
        k = max(*(entry[2] for entry in drafts), 1)
    file = schedule[0].with_suffix(".sglang.json").absolute() if schedule else Path()
    model, arguments = launch_arguments(folder, program, target, k, drafts, file)
    if drafts and program == "sglang":
        write_json(file, sglang_schedule(drafts))
    address = ["--host", "127.0.0.1", "--port", str(port)]
    command = [*find_server(program), *arguments, *address, *_COUNTERS[program], *more]
    run = run_of(folder)
    report = run and run / STAGES["eval"].artefact
    if report and (report / REPORT).is_file():
        bench = f"--head {quote(str(report))}" + f" --target {quote(target or '')}" * bool(target)
    else:
        bench = f"--target {quote(target or model)} --suite PROMPTS"
    return PlannedServer(PROGRAMS[program], command, bench)


def _find_export(name: str, program: str) -> Path:
    path = Path(name).expanduser()
    if path.is_dir() and not (path / RECIPE).is_file():
        return path
    run = find_run(name)
    layouts = ("vllm", "speculators") if program == "vllm" else (program,)
    for layout in layouts:
        if (run / "export" / layout / LAUNCH).is_file():
            return run / "export" / layout
    to = f"{layouts[0]} --gguf" if program == "llamacpp" else layouts[0]
    raise UserError(
        f"expected the run to have an export for {PROGRAMS[program]}, found none",
        where=run / "export",
        do=f"`draftlab export --run {quote(name)} --to {to}` writes one",
    )
