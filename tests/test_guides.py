"""The commands and the Python of README and the guides run as printed, on the embedded target.

Blocks marked `sh` are typed in their order; blocks marked `python` are executed. Any other command
is in NOT_RUN, with the reason.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from draftlab.engine.counters import Counters
from tests.helpers.small_run import draftlab, ran, write_prompts

ROOT = Path(__file__).resolve().parents[1]
GUIDES = sorted((ROOT / "docs/guide").glob("*.md"))
README = ROOT / "README.md"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^(?:draftlab|make|pip|python|torchrun|vllm) .*", re.MULTILINE)
NOT_RUN = {
    "pip install .": "installs; tests/test_wheel.py installs the package",
    "make quickstart": "sets up an environment from the network",
    "make real": "fetches a model from the network",
    "make test": "runs these tests",
    "python data_prep/chats.py ultrachat:100000 magpie my.jsonl --out prompts.jsonl": "network",
    "vllm serve TARGET --speculative-config": "needs vLLM and a GPU",
    "draftlab serve my --with vllm": "needs vLLM; tests/cli/test_serve.py",
    "draftlab bench http://HOST:8000": "needs running servers; tests/evaluate/test_server_bench.py",
    "pip install '.[ray]'": "installs from the network",
    "draftlab run my.yaml --ray auto": "needs a running Ray cluster",
    "pip install '.[ray,s3]'": "installs from the network",
    "draftlab run my.yaml --ray auto record.url=s3://bucket/my-store": "needs a bucket",
}
"""Commands that are not run here, or their beginnings, and why."""
SMALLER = {
    "draftlab eval --head reference": "--max-new-tokens 8 --timing-prompts 1 --timing-tokens 4",
    "draftlab eval --head imported": "--max-new-tokens 8",
    "draftlab eval --run my --calibrate": "--max-prompts 40",
    "draftlab doctor": "--max-new-tokens 16 --max-prompts 32",
}
"""Beginnings of commands that take long as printed, and the options that are typed behind them."""
FRAGMENTS = {"add_a_family": "tests/families/test_sixth_family.py has the whole code"}
"""Guides whose Python is not complete, and what is tested instead."""
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


def in_order() -> list[Path]:
    """Return README and the guides in the order in which README names them."""
    names = re.findall(r"docs/guide/(\w+\.md)\)", README.read_text().split("## Read on")[1])
    return [README, *(ROOT / "docs/guide" / name for name in names)]


def type_commands(page: Path, folder: Path) -> None:
    """Type the commands of a page's `sh` blocks."""
    commands = [line for text in blocks(page, "sh") for line in text.strip().split("\n")]
    for command in commands:
        program, *arguments = shlex.split(command, comments=True)
        assert program == "draftlab", command
        for beginning, options in SMALLER.items():
            if command.startswith(beginning):
                arguments += options.split()
        result = draftlab(folder, *arguments)
        # The doctor's exit code 1 means that it found faults, as in a head of four steps.
        allowed = (0, 1) if arguments[0] == "doctor" else (0,)
        assert result.exit_code in allowed, f"{page.name}: {command}\n{result.output}"


def run_python(page: Path, folder: Path) -> None:
    """Execute the `python` block of a page."""
    (text,) = blocks(page, "python")
    with contextlib.chdir(folder):
        exec(compile(text, page.name, "exec"), {})


@pytest.mark.slow
def test_all_guides_run_one_after_the_other(tmp_path: Path) -> None:
    """A reader who types everything, in README's order, starts with a recipe alone."""
    (tmp_path / "my.yaml").write_text(RECIPE)
    for page in in_order():
        type_commands(page, tmp_path)
        if page.stem == "python_api":
            run_python(page, tmp_path)
            assert (tmp_path / "exported/config.json").is_file()
            assert (tmp_path / "report/report.html").is_file()
    report = json.loads((tmp_path / "runs/my/eval-parallel/report.json").read_text())
    assert {row["head"] for row in report["rows"]} > {"my", "parallel"}  # not one head twice


def test_every_command_is_run_or_listed_with_a_reason() -> None:
    printed = [
        (page, command)
        for page in in_order()
        for kind, text in BLOCK.findall(page.read_text())
        if kind != "sh"
        for command in COMMAND.findall(text)
    ]
    beginnings = set()
    for page, command in printed:
        words = " ".join(command.split("#")[0].split())
        found = [start for start in NOT_RUN if words == start or words.startswith(f"{start} ")]
        assert found, f"{page.name}: mark the block of this command `sh`, or list it: {command}"
        beginnings.add(max(found, key=len))
    assert beginnings == NOT_RUN.keys()
    python = {page.stem for page in GUIDES if blocks(page, "python")}
    assert python == {"python_api", "own_drafter", *FRAGMENTS}


def test_the_commands_that_are_not_run_exist() -> None:
    for command in NOT_RUN:
        if command.startswith("draftlab "):
            arguments = shlex.split(command)[1:]
            assert draftlab(ROOT, *arguments, "--help").exit_code == 0, command


@pytest.mark.parametrize("page", [README, ROOT / "docs/guide/own_model.md"], ids=lambda p: p.stem)
def test_the_printed_recipe_can_be_planned_offline(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    recipe = next(text for text in blocks(page, "yaml") if "target:" in text)
    (tmp_path / "my.yaml").write_text(recipe)
    for name in ("prompts", "heldout"):
        write_prompts(tmp_path / f"{name}.jsonl", ["a question", "another one"])
    result = ran(tmp_path, "train", "my.yaml", "--plan")
    assert "Qwen3ForCausalLM: 8.19 B parameters" in result.output


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
    assert len(text.encode()) <= 5 * 1024
    assert "pip install" in "\n".join(text.split("\n")[:40])


def test_every_guide_is_linked_from_readme() -> None:
    text = (ROOT / "README.md").read_text()
    assert [page.name for page in GUIDES if f"docs/guide/{page.name}" not in text] == []
