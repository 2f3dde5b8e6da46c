"""Damaged heads and stores, and folders in the way of the commands that read them.

Every case must be refused with what was expected and found and what to do, and never as an
internal error.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.small_run import draftlab

Damage = Callable[[Path], object]
pytestmark = pytest.mark.slow
RUN = "runs/small"
HEAD = f"{RUN}/head"
STORE = f"{RUN}/store"
SHARD = f"{STORE}/shard-00000.safetensors"


@dataclass(frozen=True)
class Case:
    """A command on a damaged working directory, and text that its output must contain."""

    command: str
    words: str
    damage: Damage = lambda folder: None


def name(case: Case) -> str:
    return f"{case.command[:60]}: {case.words[:30]}"


def write(path: str, text: str) -> Damage:
    """Return what writes a file of a folder."""
    return lambda folder: (folder / path).write_text(text)


def remove(path: str) -> Damage:
    return lambda folder: (folder / path).unlink()


def cut(path: str, length: int) -> Damage:
    """Return what keeps the first bytes of a file only."""
    return lambda folder: (folder / path).write_bytes((folder / path).read_bytes()[:length])


def flip(path: str, position: int) -> Damage:
    """Return what inverts one byte of a file."""

    def damage(folder: Path) -> None:
        data = bytearray((folder / path).read_bytes())
        data[position] ^= 0xFF
        (folder / path).write_bytes(data)

    return damage


def edit(path: str, **fields: Any) -> Damage:
    """Return what sets fields of a JSON file; `...` removes a field."""

    def damage(folder: Path) -> None:
        values = json.loads((folder / path).read_text()) | fields
        kept = {key: value for key, value in values.items() if value is not ...}
        (folder / path).write_text(json.dumps(kept))

    return damage


READERS = (
    f"inspect {HEAD}",
    f"eval --head {HEAD} --target toy --suite prompts.jsonl --max-prompts 1 --max-new-tokens 4 "
    "--out e",
    f"export --head {HEAD} --target toy --to vllm --out x",
    f"doctor {HEAD} --target toy",
)


def heads(*cases: tuple[Damage, str]) -> list[Case]:
    """Return a case for each damage of a head; the commands that read heads take turns."""
    return [
        Case(command, words, damage)
        for (damage, words), command in zip(cases, cycle(READERS), strict=False)
    ]


CONFIG = f"{HEAD}/draftlab.json"
WEIGHTS = f"{HEAD}/model.safetensors"
REFUSED = [
    *heads(
        (edit(CONFIG, family="x"), "expected a family of heads"),
        (edit(CONFIG, hidden_size=-1), "hidden_size"),
        (edit(CONFIG, head_dim=7), "head_dim"),
        (edit(CONFIG, boundaries=[99]), "boundaries"),
        (edit(CONFIG, rope_parameters={"rope_type": "magic"}), "rope"),
        (edit(CONFIG, extra=1), "extra"),
        (write(CONFIG, "[1]"), "draftlab.json"),
        (cut(CONFIG, 40), "not JSON"),
        (cut(WEIGHTS, 5000), "weights"),
        (remove(WEIGHTS), "safetensors"),
    ),
    *[Case(command, "shape", edit(CONFIG, hidden_size=64)) for command in READERS[1:]],
    Case("inspect small", "shard-00000", cut(SHARD, 200)),
    Case(f"store merge {STORE} --out s3://bucket/o", "found the URL s3://bucket/o"),
    Case(f"import {RUN}/export/speculators --to toy", "new or an empty folder"),
    Case(f"import {RUN}/export/speculators --to h --target toy --boundaries 9", "boundaries"),
    Case("export --run small --to vllm --out toy", "toy"),
]
DAMAGED_STORE = [
    Case(command, words, damage)
    for damage, words in (
        (cut(f"{STORE}/manifest.json", 100), "manifest"),
        (write(f"{STORE}/manifest.json", "[]"), "manifest"),
        (edit(f"{STORE}/manifest.json", schema=99), "manifest"),
        (edit(f"{STORE}/manifest.json", identity=...), "manifest"),
        (flip(SHARD, -200), "shard-00000"),
        (cut(SHARD, 200), "shard-00000"),
    )
    for command in (
        f"store merge {STORE} --out o",
        f"inspect {STORE} --verify",
    )
]
"""Damage that the store's verbs must name; `run` and `train` make such artefacts again."""


@pytest.mark.parametrize("case", [*REFUSED, *DAMAGED_STORE], ids=name)
def test_refused(case: Case, folder: Path) -> None:
    case.damage(folder)
    result = draftlab(folder, *case.command.split(" "))
    output = result.output
    assert "internal error" not in output
    assert "Traceback" not in output
    assert result.exit_code == (1 if case.command.startswith("doctor runs") else 2), output
    assert case.words.lower() in " ".join(output.lower().split()), output
    # Typer words its own refusals of options.
    assert "do: " in output or "Usage: " in output or "╭" in output, output
