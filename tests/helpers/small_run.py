"""A whole run in two seconds: a toy target, twelve prompts and the command line in-process."""

from __future__ import annotations

import atexit
import contextlib
import json
import shutil
import signal
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from draftlab import Monitor, Pipeline, load_recipe
from draftlab.cli import app
from draftlab.errors import UserError
from tests.helpers.monitors import RecordingMonitor
from tests.helpers.toys import toy_target_folder

if TYPE_CHECKING:
    from click.testing import Result

RECIPES = Path(__file__).parents[2] / "recipes"
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
PRINTED = "printed.txt"
"""What the finished run said on stderr, in its working directory."""


class InterruptingMonitor(RecordingMonitor):
    """Interrupts a stage, as Ctrl-C does, when its progress reaches a number."""

    def __init__(self, stage: str, done: float) -> None:
        super().__init__()
        self.stage, self.done = stage, done

    def progress(self, stage: str, done: float, total: float, detail: str = "") -> None:
        if stage == self.stage and done >= self.done:
            raise KeyboardInterrupt


class SignallingMonitor(RecordingMonitor):
    """Sends this process a signal once, when the progress of a training reaches a number."""

    def __init__(self, number: int, done: float) -> None:
        super().__init__()
        self.number, self.done = number, done

    def progress(self, stage: str, done: float, total: float, detail: str = "") -> None:
        if stage == "train" and done == self.done:
            signal.raise_signal(self.number)


def write_prompts(path: Path, texts: list[str]) -> None:
    """Write a conversation of one user turn for each text."""
    lines = (
        {"id": f"p{i}", "messages": [{"role": "user", "content": text}]}
        for i, text in enumerate(texts)
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def new_workshop(folder: Path) -> Path:
    """Write the toy target, prompts.jsonl and small.yaml into a working directory; return it."""
    folder.mkdir(parents=True, exist_ok=True)
    toy_target_folder(folder / "toy", layers=4, hidden=32)
    write_prompts(folder / "prompts.jsonl", [f"def f{i}(use): the user {i}" for i in range(12)])
    (folder / "small.yaml").write_text(RECIPE)
    return folder


@cache
def finished() -> Path:
    """Return a working directory with the finished run `small`, for reading only."""
    folder = Path(tempfile.mkdtemp(prefix="draftlab-test-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    new_workshop(folder)
    (folder / PRINTED).write_text(ran(folder, "run", "small.yaml").stderr)
    return folder


def copy_of_finished(folder: Path) -> Path:
    """Return a copy of `finished()` that a test can change."""
    shutil.copytree(finished(), folder, symlinks=True, dirs_exist_ok=True)
    return folder


def draftlab(folder: Path, *arguments: object) -> Result:
    """Run the command line in a working directory."""
    with contextlib.chdir(folder):
        return CliRunner().invoke(app, list(map(str, arguments)), prog_name="draftlab")


def ran(folder: Path, *arguments: object, code: int = 0) -> Result:
    """Run a command that must end with an exit code."""
    result = draftlab(folder, *arguments)
    assert result.exit_code == code, result.output
    return result


def refused(folder: Path, *arguments: object) -> str:
    """Run a command that must fail with one user error; return stderr."""
    result = draftlab(folder, *arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.count("error: ") == 1
    assert "Traceback" not in result.stderr
    assert half_written(folder) == []
    return result.stderr


def pipeline(*overrides: str, monitor: Monitor | None = None) -> Pipeline:
    """Return the pipeline of small.yaml in the current directory."""
    return Pipeline(load_recipe(Path("small.yaml"), overrides), monitor or Monitor())


def error_of(last: str, *overrides: str) -> UserError:
    """Make a stage and those before it, which must fail; return the error."""
    with pytest.raises(UserError) as caught:
        pipeline(*overrides).make(last)
    return caught.value


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Return size and modification time of every file under a folder."""
    files = [p for p in folder.rglob("*") if p.is_file() and p.name != ".lock"]
    return {str(p.relative_to(folder)): (p.stat().st_size, p.stat().st_mtime_ns) for p in files}


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every file under a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def half_written(folder: Path) -> list[Path]:
    """Return the files that a crash or an error should not leave."""
    return [p for p in folder.rglob("*") if p.name.endswith((".tmp", ".old"))]
