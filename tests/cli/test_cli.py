"""The command line: help, errors as one message, exit codes, what is printed and where."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from rich.console import Console
from safetensors import SafetensorError
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from draftlab.cli import app
from draftlab.cli.console import ConsoleMonitor
from draftlab.cli.errors import guard
from draftlab.errors import UserError
from draftlab.evaluate.evaluator import Evaluator
from draftlab.pipeline import pipeline
from draftlab.target_model.locate import explain_loading
from tests.helpers.small_run import draftlab, finished, ran, snapshot

VERBS = (
    "run", "prepare", "record", "train", "eval", "bench", "chat", "doctor", "export", "import",
    "push", "new", "inspect", "recipe", "serve", "store", "version",
)  # fmt: skip


def raises(error: BaseException) -> Callable[..., None]:
    """Return a function that raises an error."""

    def function(*_: object, **__: object) -> None:
        raise error

    return function


@pytest.mark.parametrize(
    ("error", "exit_code", "message"),
    [
        (ZeroDivisionError("oh"), 1, "internal error: ZeroDivisionError: oh"),
        (KeyboardInterrupt(), 130, "keeps what is finished"),
    ],
)
def test_internal_errors_and_interruptions(
    error: BaseException, exit_code: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = finished()  # must exist before `make` is broken
    monkeypatch.setattr(pipeline.Pipeline, "make", raises(error))
    result = draftlab(folder, "train", "small.yaml")
    assert result.exit_code == exit_code
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    result = draftlab(folder, "train", "small.yaml", "--debug")
    assert result.exit_code == exit_code
    assert "Traceback" in result.stderr


def test_an_interrupted_evaluation_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = finished()
    before = snapshot(folder / "runs")
    monkeypatch.setattr(Evaluator, "run", raises(KeyboardInterrupt()))
    for where in ("--out", str(tmp_path / "out")), ():
        result = draftlab(folder, "eval", "--temps", "1", *where)
        assert result.exit_code == 130
        assert "nothing was written" in result.stderr
    assert not (tmp_path / "out").exists()
    assert snapshot(folder / "runs") == before  # the former report and its record


def test_an_error_removes_the_progress_bar() -> None:
    # A progress bar hides the cursor, and only its end shows it again.
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    monitor = ConsoleMonitor(console)
    monitor.progress("record", 1, 9, "7 tokens/s")
    with pytest.raises(typer.Exit), guard(False, monitor=monitor):
        raise UserError("expected this", where="there", do="that")
    shown = console.file.getvalue()
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
    assert shown.index("expected this") > shown.rindex("7 tokens/s")


@pytest.mark.parametrize(
    ("error", "where", "do"),
    [
        (OSError(errno.ENOSPC, "full", "runs/a/x"), "runs/a/x", "free some disk"),
        (OSError(errno.ENOSPC, "full"), "a file under ", "free some disk"),
        (OSError(errno.EACCES, "denied", "runs/a/x"), "runs/a/x", "let this user write there"),
        (
            SafetensorError("Error while serializing: I/O error: x (os error 28)"),
            "a file under ",
            "free some disk",
        ),
    ],
)
def test_a_full_or_read_only_disk_is_a_user_error(error: Exception, where: str, do: str) -> None:
    """Transformers and draftlab write checkpoints by safetensors."""
    console = Console(file=io.StringIO(), width=100)
    with pytest.raises(typer.Exit) as ended, guard(False, monitor=ConsoleMonitor(console)):
        raise error
    assert ended.value.exit_code == 2
    first, second, third = console.file.getvalue().splitlines()
    assert first.startswith("error: expected to write a file, found: ")
    assert second.startswith(f"where: {where}")
    assert third == f"do: {do}; the same command keeps what is finished and goes on"


def test_names_that_are_not_utf8_are_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation would compute for hours, and then not write its report."""
    name = os.fsdecode(b"caf\xe9")
    monkeypatch.setattr(sys, "argv", ["draftlab", "eval", "--out", name])
    result = ran(tmp_path, "version", code=2)
    assert "named in UTF-8, found 'caf\\udce9'" in result.stderr
    (tmp_path / name).mkdir()
    monkeypatch.setattr(sys, "argv", ["draftlab"])
    assert draftlab(tmp_path / name, "version").exit_code == 2


def test_a_read_only_cache_is_no_fault_of_a_target() -> None:
    with pytest.raises(OSError, match="Read-only"), explain_loading("the target", "x.gguf"):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "cache")


def test_long_lines_are_not_wrapped_in_a_log() -> None:
    console = Console(file=io.StringIO(), width=40)
    monitor = ConsoleMonitor(console)
    path = "/a/folder/[with]/brackets/" + "long/" * 20
    monitor.say(f"head: {path}")
    with pytest.raises(typer.Exit) as ended, guard(False, monitor=monitor):
        raise UserError("no head", where=path)
    assert ended.value.exit_code == 2
    assert console.file.getvalue() == f"head: {path}\nerror: no head\nwhere: {path}\n"


def test_the_list_of_verbs_is_complete(tmp_path: Path) -> None:
    names = {c.name or c.callback.__name__ for c in app.registered_commands}
    assert names | {g.name for g in app.registered_groups} == set(VERBS)
    for verb in (*VERBS, "recipe schema", "recipe show"):
        assert "Usage: draftlab" in draftlab(tmp_path, *verb.split(), "--help").stdout
    for arguments in ("--version", "version"):
        assert draftlab(tmp_path, arguments).stdout.startswith("0.1.0")
    assert draftlab(tmp_path, "recipe", "schema").stdout.count("\n") > 100
    assert "properties" in json.loads(draftlab(tmp_path, "recipe", "schema", "--json").stdout)


def test_mistakes_are_reported_before_torch_is_imported(tmp_path: Path) -> None:
    """`--help` and errors in arguments must not wait seconds for imports."""
    (tmp_path / "small.yaml").write_text("train: {steps: 1}")
    commands = [
        "--help", "eval --help", "evla", "eval --foo", "eval --temps 0,hot", "eval --k 0",
        "eval --engine fast", "eval --dtype float8", "export --to ggfu", "export --k 0",
        "train none.yaml", "train small.yaml train.stepz=1", "run small.yaml eval.k=[0]",
        "train small.yaml --gpu x", "doctor x --k 0", "push x noname", "push x a/b --to ggfu",
        "recipe show small.yaml", "recipe schema", "version", "serve x --with tgi",
    ]  # fmt: skip
    code = (
        "import shlex, sys; from draftlab.cli import app\n"
        "for line in sys.stdin:\n"
        "    try: app(shlex.split(line), prog_name='draftlab')\n"
        "    except SystemExit as end: print('exit', end.code or 0)\n"
        "heavy = {'torch', 'transformers', 'accelerate', 'matplotlib', 'numpy', 'tokenizers'}\n"
        "print('heavy', sorted(heavy & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input="\n".join(commands), capture_output=True, text=True,
        check=True, cwd=tmp_path,
    )  # fmt: skip
    ends = [line for line in done.stdout.splitlines() if line.startswith(("exit ", "heavy "))]
    valid = {"--help", "eval --help", "recipe show small.yaml", "recipe schema", "version"}
    assert ends == [f"exit {0 if line in valid else 2}" for line in commands] + ["heavy []"]
    assert "Usage: draftlab" in done.stdout
    for output in ("--to: expected a layout", "--k: expected a number", "--dtype: expected 'auto'"):
        assert output in done.stderr


def test_a_tokenizer_that_gives_a_text_up_is_no_bug() -> None:
    """Rust raises what no `except Exception` catches, here since the pattern takes too long."""
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(x+x+)+y"), "isolated")
    console = Console(file=io.StringIO(), width=100)
    with pytest.raises(typer.Exit) as ended, guard(False, monitor=ConsoleMonitor(console)):
        tokenizer.encode("x" * 5000)
    assert ended.value.exit_code == 2
    assert "probably the tokenizer on a text: Onig" in " ".join(console.file.getvalue().split())
