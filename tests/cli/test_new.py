"""`draftlab new`: a recipe whose plan passes, and that replaces no file."""

from __future__ import annotations

from pathlib import Path
from sys import modules
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from draftlab import load_recipe
from draftlab.cli import app
from draftlab.text.settings import PromptSettings
from tests.helpers.small_run import ran, refused

GIVEN = ("--target", "toy", "--prompts", "prompts.jsonl")


@pytest.mark.parametrize(("gpu", "family"), [("H100", "eagle3"), ("cpu", "eagle")])
def test_the_written_recipe_passes_its_plan(gpu: str, family: str, workshop: Path) -> None:
    ran(workshop, "new", "a/b/my.yaml", *GIVEN, "--gpu", gpu, "--family", family)
    (workshop / "a/b/my.yaml").rename(workshop / "my.yaml")
    ran(workshop, "train", "my.yaml", "--plan")
    recipe, text = load_recipe(workshop / "my.yaml"), (workshop / "my.yaml").read_text()
    assert (recipe.target.path, recipe.prompts.source) == ("toy", "prompts.jsonl")
    assert (recipe.hardware.gpu or "cpu", recipe.head.family) == (gpu, family)
    assert recipe.record.max_length == recipe.train.row_tokens
    meaning = PromptSettings.model_fields["source"].description or ""
    assert f"  # {meaning.split(',')[0]}" in text
    assert "# estimate (" in text
    assert "found one that exists" in refused(workshop, "new", "my.yaml", *GIVEN)
    assert (workshop / "my.yaml").read_text() == text


def test_what_is_not_given_is_asked_on_a_terminal_alone(
    workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "--prompts" in refused(workshop, "new", "my.yaml", *GIVEN[:2])
    assert "GTX" in refused(workshop, "new", "my.yaml", *GIVEN, "--gpu", "GTX")
    assert "no.jsonl" in refused(workshop, "new", "my.yaml", *GIVEN[:3], "no.jsonl")
    assert "found a file" in refused(workshop, "new", "prompts.jsonl/my.yaml", *GIVEN)
    assert not (workshop / "my.yaml").exists()
    terminal = SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr(modules["draftlab.cli.new"], "sys", terminal)
    monkeypatch.chdir(workshop)
    result = CliRunner().invoke(app, ["new", "my.yaml"], input="toy\nprompts.jsonl\nL40S\n")
    assert result.exit_code == 0, result.output
    recipe = load_recipe(workshop / "my.yaml")
    assert (recipe.target.path, recipe.prompts.source) == ("toy", "prompts.jsonl")
    assert recipe.hardware.gpu == "L40S"
