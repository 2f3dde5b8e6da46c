"""`draftlab push`: the uploaded folder, its card, and what must not leave the machine."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard, constants

from draftlab.evaluate.results import Report
from draftlab.heads.folder import CONFIG, WEIGHTS
from tests.helpers.hub_stub import TOKEN, stub_hub
from tests.helpers.small_run import contents, copy_of_finished, draftlab, finished

PUSH = ("push", "small", "org/tiny-head")


@pytest.fixture
def workshop(tmp_path: Path) -> Path:
    return copy_of_finished(tmp_path / "workshop")


def dry_run(workshop: Path, *options: str) -> Any:
    return draftlab(workshop, *PUSH, "--dry-run", *options)


def test_a_dry_run_writes_the_folder_and_sends_nothing(
    workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stub_hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        result = dry_run(workshop, "--base-model", "org/base", "--license", "apache-2.0")
        assert not hub.requests
    assert result.exit_code == 0, result.output
    folder = workshop / "runs" / "small" / "hub" / "org--tiny-head"
    files = contents(folder)
    assert files.keys() >= {"README.md", "config.json", "model.safetensors", "launch.md"}
    assert "recipe.yaml" in files
    card = ModelCard.load(folder / "README.md")
    assert (card.data.base_model, card.data.license) == ("org/base", "apache-2.0")
    assert "draftlab" in card.data.tags
    report = Report.read(folder / "report.json")
    (row,) = [r for r in report.rows if r.drafter != "none" and r.temperature == 0]
    result = card.data.eval_results[0]
    expected = ("acceptance_length", round(row.acceptance_length, 3))
    assert (result.metric_type, result.metric_value) == expected
    line = next(x for x in card.text.splitlines() if x.startswith("| 0 | 2 |"))
    cells = [cell.strip() for cell in line.split("|")]
    counters = (row.drafts, row.draft_tokens, row.accepted, row.output_tokens)
    assert cells[6:10] == [str(n) for n in counters]
    assert "vllm serve org/tiny-head" in card.text
    assert "vllm serve org/base" in card.text
    config = json.loads(files["config.json"])
    assert config["speculators_config"]["verifier"]["name_or_path"] == "org/base"


def test_a_pushed_head_can_be_imported(workshop: Path) -> None:
    assert dry_run(workshop, "--out", "out").exit_code == 0
    result = draftlab(workshop, "import", "out", "--to", "back", "--target", "toy")
    assert result.exit_code == 0, result.output
    head = workshop / "runs" / "small" / "head"
    assert (workshop / "back" / WEIGHTS).read_bytes() == (head / WEIGHTS).read_bytes()


def test_the_folder_contains_no_path_of_this_machine(workshop: Path) -> None:
    recipe = workshop / "runs" / "small" / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("path: toy", f"path: {workshop / 'toy'}"))
    result = dry_run(workshop, "--to", "vllm", "--out", "out")
    assert result.exit_code == 0, result.output
    assert "--base-model" in result.output  # a local path is no base model
    for name, data in contents(workshop / "out").items():
        if not name.endswith((".safetensors", ".png")):
            assert str(workshop) not in data.decode(), name
            assert not re.search(r"/(tmp|home|root)/", data.decode()), name
    assert ModelCard.load(workshop / "out" / "README.md").data.base_model is None


def test_a_push_is_private_and_never_shows_the_token(
    workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with stub_hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        result = draftlab(workshop, *PUSH)
        assert result.exit_code == 0, result.output
        repo = hub.repos["org/tiny-head"]
        assert repo.private
        assert repo.files == contents(workshop / "runs/small/hub/org--tiny-head")
        assert f"Bearer {TOKEN}" in hub.authorizations
        assert f"{hub.url}/org/tiny-head" in result.output

        hub.refuse = 401
        refused = draftlab(workshop, *PUSH)
    assert refused.exit_code == 2
    assert "hf auth login" in refused.output
    assert TOKEN not in result.output + refused.output
    for name, data in contents(workshop).items():
        assert TOKEN.encode() not in data, name


def test_a_run_without_a_current_report_is_refused(workshop: Path) -> None:
    report = workshop / "runs" / "small" / "eval" / "report.json"
    os.utime(report, (1, 1))
    result = dry_run(workshop)
    assert result.exit_code == 2
    assert "older than the head" in result.output
    os.utime(workshop / "runs" / "small" / "head" / CONFIG, (0, 0))
    assert dry_run(workshop).exit_code == 0
    report.unlink()
    result = dry_run(workshop)
    assert result.exit_code == 2
    assert "draftlab eval --run small" in result.output


def test_a_folder_with_other_content_is_not_changed(workshop: Path) -> None:
    (workshop / "notes").mkdir()
    (workshop / "notes" / "notes.txt").write_text("text")
    result = dry_run(workshop, "--out", "notes")
    assert result.exit_code == 2
    assert "found other content" in result.output
    assert contents(workshop / "notes") == {"notes.txt": b"text"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("push", "small", "justname", "--dry-run"), "org/name"),
        ((*PUSH, "--dry-run", "--to", "gguf"), "did you mean"),
        (("push", "nowhere", "org/x", "--dry-run"), ""),
    ],
)
def test_wrong_arguments_are_refused(arguments: tuple[str, ...], words: str) -> None:
    result = draftlab(finished(), *arguments)
    assert result.exit_code == 2
    assert words in result.output
