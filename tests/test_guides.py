"""The commands and the Python of README and the guides run, on the embedded target.

Blocks marked `sh` are typed in their order; blocks marked `python` are executed. Blocks without a
mark need a GPU, a server or a network, and are not run.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from draftlab.engine.counters import Counters
from tests.helpers.small_run import draftlab

ROOT = Path(__file__).resolve().parents[1]
GUIDES = sorted((ROOT / "docs/guide").glob("*.md"))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RECIPE = """\
target: embedded
prompts: {source: embedded, max_prompts: 6}
regenerate: {max_new_tokens: 12, batch: 6}
draft_vocab: {size: 512}
train: {steps: 4, row_tokens: 256, batch_rows: 1, ttt_steps: 2, validation_share: 0.2}
eval: {max_prompts: 2, max_new_tokens: 8, timing_prompts: 1, timing_tokens: 4, k: 2}
"""


def blocks(page: Path, kind: str) -> list[str]:
    return [text for mark, text in BLOCK.findall(page.read_text()) if mark == kind]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with my.yaml and its finished run."""
    folder = tmp_path_factory.mktemp("guides")
    (folder / "my.yaml").write_text(RECIPE)
    result = draftlab(folder, "run", "my.yaml")
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture
def workshop(finished: Path, tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "workshop"
    shutil.copytree(finished, folder, symlinks=True)
    with contextlib.chdir(folder):
        yield folder


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in GUIDES if blocks(p, "sh")], ids=lambda p: p.stem)
def test_the_commands_of_a_guide_run(page: Path, workshop: Path) -> None:
    commands = [line for text in blocks(page, "sh") for line in text.strip().split("\n")]
    for command in commands:
        program, *arguments = shlex.split(command)
        assert program == "draftlab", command
        result = draftlab(workshop, *arguments)
        # The doctor's exit code 1 means that it found faults, as in a head of four steps.
        allowed = (0, 1) if arguments[0] == "doctor" else (0,)
        assert result.exit_code in allowed, f"{command}\n{result.output}"


@pytest.mark.slow
def test_the_python_of_the_api_guide_runs(workshop: Path) -> None:
    (text,) = blocks(ROOT / "docs/guide/python_api.md", "python")
    exec(compile(text, "python_api.md", "exec"), {})
    assert (workshop / "exported/config.json").is_file()
    assert (workshop / "report/report.html").is_file()


def test_the_drafter_of_its_guide_keeps_the_tokens() -> None:
    names: dict[str, Any] = {}
    (text,) = blocks(ROOT / "docs/guide/own_drafter.md", "python")
    exec(compile(text, "own_drafter.md", "exec"), names)
    requests = names["requests"][16:]
    expected, drafted = (
        {g.id: g for g in names[engine].generate(requests)} for engine in ("plain", "engine")
    )
    assert all(drafted[name].token_ids == expected[name].token_ids for name in expected)
    counters = Counters.total(g.counters for g in drafted.values())
    assert counters.accepted > counters.drafts / 10


def test_readme_is_short_and_installs_early() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.encode()) <= 6000
    assert "pip install" in "\n".join(text.split("\n")[:40])


def test_every_guide_is_linked_from_readme() -> None:
    text = (ROOT / "README.md").read_text()
    assert [page.name for page in GUIDES if f"docs/guide/{page.name}" not in text] == []
