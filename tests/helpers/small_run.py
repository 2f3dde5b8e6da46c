"""A whole run in two seconds: a toy target, a dozen prompts, and the command line in-process."""

from __future__ import annotations

import atexit
import contextlib
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from typer.testing import CliRunner

from draftlab.cli import app
from draftlab.progress import Monitor
from tests.helpers.toys import toy_target_folder

if TYPE_CHECKING:
    from click.testing import Result

RECIPE = """\
target: toy
prompts: {source: prompts.jsonl}
regenerate: {max_new_tokens: 24, batch: 8, piece: 4}
record: {shard_tokens: 256}
draft_vocab: {size: 128}
train:
  steps: 6
  row_tokens: 128
  batch_rows: 2
  ttt_steps: 2
  log_every: 1
  checkpoint_every: 2
  validation_share: 0.2
eval:
  suite: prompts.jsonl
  max_prompts: 3
  k: 2
  max_new_tokens: 12
  timing_prompts: 0
"""


class Heard(Monitor):
    """Keeps what was said; interrupts (as ^C does) when a stage's progress gets somewhere."""

    def __init__(self, interrupt: tuple[str, int] | None = None) -> None:
        self.lines: list[str] = []
        self.interrupt = interrupt

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def say(self, line: str) -> None:
        self.lines.append(line)

    def progress(self, stage: str, done: float, total: float, detail: str = "") -> None:
        if self.interrupt and stage == self.interrupt[0] and done >= self.interrupt[1]:
            raise KeyboardInterrupt


def write_prompts(path: Path, texts: list[str]) -> None:
    lines = (
        {"id": f"p{i}", "messages": [{"role": "user", "content": text}]}
        for i, text in enumerate(texts)
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def new_workshop(folder: Path) -> Path:
    """A working directory with the toy target, prompts.jsonl and small.yaml."""
    folder.mkdir(parents=True, exist_ok=True)
    toy_target_folder(folder / "toy", layers=4, hidden=32)
    write_prompts(folder / "prompts.jsonl", [f"def f{i}(use): the user {i}" for i in range(12)])
    (folder / "small.yaml").write_text(RECIPE)
    return folder


@cache
def finished() -> Path:
    """A workshop with the finished run `small`, made once a process; only to be read."""
    folder = Path(tempfile.mkdtemp(prefix="draftlab-test-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    new_workshop(folder)
    result = draftlab(folder, "run", "small.yaml")
    assert result.exit_code == 0, result.output
    return folder


def copy_of_finished(folder: Path) -> Path:
    """The finished workshop, to be changed."""
    shutil.copytree(finished(), folder, symlinks=True, dirs_exist_ok=True)
    return folder


def draftlab(folder: Path, *arguments: str) -> Result:
    """The command line, in a working directory."""
    with contextlib.chdir(folder):
        return CliRunner().invoke(app, list(arguments), prog_name="draftlab")


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of change of every file under a folder."""
    files = [p for p in folder.rglob("*") if p.is_file() and p.name != ".lock"]
    return {str(p.relative_to(folder)): (p.stat().st_size, p.stat().st_mtime_ns) for p in files}


def contents(folder: Path) -> dict[str, bytes]:
    """Every file's bytes under a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def half_written(folder: Path) -> list[Path]:
    """What a crash or an error should not leave behind."""
    return [p for p in folder.rglob("*") if p.name.endswith((".tmp", ".old"))]
