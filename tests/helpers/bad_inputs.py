"""Cases of a command on a damaged working directory, and what it must answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.small_run import draftlab

Damage = Callable[[Path], object]


def write(path: str, text: str | bytes) -> Damage:
    """Return what writes a file of a folder."""
    data = text.encode() if isinstance(text, str) else text
    return lambda folder: (folder / path).write_bytes(data)


@dataclass(frozen=True)
class Case:
    """A command on a damaged working directory.

    Attributes:
        command: the arguments, separated by spaces.
        words: text that the output must contain.
        damage: done before the command.
    """

    command: str
    words: str
    damage: Damage = lambda folder: None


def name(case: Case) -> str:
    return f"{case.command[:60]}: {case.words[:30]}"


def run_case(case: Case, folder: Path) -> tuple[int, str]:
    """Return the exit code and what was printed."""
    case.damage(folder)
    result = draftlab(folder, *case.command.split(" "))
    assert "internal error" not in result.output, result.output
    assert "Traceback" not in result.output, result.output
    return result.exit_code, result.output


def check_refused(case: Case, folder: Path) -> None:
    """Run a case, which must be refused in its words and with what to do."""
    code, output = run_case(case, folder)
    assert code == (1 if case.command.startswith("doctor runs") else 2), output
    assert case.words.lower() in " ".join(output.lower().split()), output
    # Typer words its own refusals of options.
    assert "do: " in output or "Usage: " in output or "╭" in output, output
