"""The folder of a push, and the verb: what the card says, and what never leaves the machine."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from huggingface_hub import ModelCard, constants

from draftlab.evaluate.results import Report
from draftlab.heads.folder import CONFIG, WEIGHTS
from tests.helpers.hub_stub import TOKEN, stub_hub
from tests.helpers.small_run import contents, copy_of_finished, draftlab

PUSH = ("push", "small", "org/tiny-head")


@pytest.fixture
def workshop(tmp_path: Path) -> Path:
    return copy_of_finished(tmp_path / "workshop")


def test_a_dry_run_writes_the_folder_and_sends_nothing(
    workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stub_hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        result = draftlab(
            workshop, *PUSH, "--dry-run", "--base-model", "org/base", "--license", "apache-2.0"
        )
        assert not hub.requests
    assert result.exit_code == 0, result.output
    folder = workshop / "runs" / "small" / "hub" / "org--tiny-head"
    files = contents(folder)
    assert {"README.md", "config.json", "model.safetensors", "launch.md", "recipe.yaml"} <= set(
        files
    )
    card = ModelCard.load(folder / "README.md")
    assert card.data.base_model == "org/base"
    assert card.data.license == "apache-2.0"
    assert "draftlab" in card.data.tags
    report = Report.read(folder / "report.json")
    (row,) = [r for r in report.rows if r.drafter != "none" and r.temperature == 0]
    found = {r.metric_type: r.metric_value for r in card.data.eval_results[:1]}
    assert found == {"acceptance_length": round(row.acceptance_length, 3)}
    # Raw counters stand beside the ratio, and the commands name the repository.
    line = next(x for x in card.text.splitlines() if x.startswith("| 0 | 2 |"))
    cells = [cell.strip() for cell in line.split("|")]
    assert cells[6:10] == [
        str(n) for n in (row.drafts, row.draft_tokens, row.accepted, row.output_tokens)
    ]
    assert "vllm serve org/tiny-head" in card.text
    assert "vllm serve org/base" in card.text
    config = json.loads(files["config.json"])
    assert config["speculators_config"]["verifier"]["name_or_path"] == "org/base"


def test_what_was_pushed_can_be_imported_again(workshop: Path) -> None:
    assert draftlab(workshop, *PUSH, "--dry-run", "--out", "there").exit_code == 0
    result = draftlab(workshop, "import", "there", "--to", "back", "--target", "toy")
    assert result.exit_code == 0, result.output
    head = workshop / "runs" / "small" / "head"
    assert (workshop / "back" / WEIGHTS).read_bytes() == (head / WEIGHTS).read_bytes()


def test_no_path_of_this_machine_is_in_it(workshop: Path) -> None:
    recipe = workshop / "runs" / "small" / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("path: toy", f"path: {workshop / 'toy'}"))
    result = draftlab(workshop, *PUSH, "--dry-run", "--to", "vllm", "--out", "there")
    assert result.exit_code == 0, result.output
    assert "--base-model" in result.output  # which it could not know
    files = contents(workshop / "there")
    for name, data in files.items():
        if not name.endswith((".safetensors", ".png")):
            assert str(workshop) not in data.decode(), name
            assert not re.search(r"/(tmp|home|root)/", data.decode()), name
    assert ModelCard.load(workshop / "there" / "README.md").data.base_model is None


def test_the_verb_pushes_privately_and_keeps_the_token_to_itself(
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
    for text in (result.output, refused.output):
        assert TOKEN not in text
    for name, data in contents(workshop).items():
        assert TOKEN.encode() not in data, name


def test_a_run_that_was_not_measured_is_refused(workshop: Path) -> None:
    report = workshop / "runs" / "small" / "eval" / "report.json"
    head = workshop / "runs" / "small" / "head" / CONFIG
    os.utime(report, (1, 1))
    result = draftlab(workshop, *PUSH, "--dry-run")
    assert result.exit_code == 2
    assert "older than the head" in result.output
    os.utime(head, (0, 0))
    assert draftlab(workshop, *PUSH, "--dry-run").exit_code == 0
    report.unlink()
    result = draftlab(workshop, *PUSH, "--dry-run")
    assert result.exit_code == 2
    assert "draftlab eval --run small" in result.output


def test_a_folder_of_something_else_is_left_alone(workshop: Path) -> None:
    (workshop / "mine").mkdir()
    (workshop / "mine" / "notes.txt").write_text("mine")
    result = draftlab(workshop, *PUSH, "--dry-run", "--out", "mine")
    assert result.exit_code == 2
    assert "no push wrote" in result.output
    assert contents(workshop / "mine") == {"notes.txt": b"mine"}


def test_what_a_layout_cannot_hold_and_bad_names_are_refused(workshop: Path) -> None:
    result = draftlab(workshop, "push", "small", "justname", "--dry-run")
    assert result.exit_code == 2
    assert "org/name" in result.output
    result = draftlab(workshop, *PUSH, "--dry-run", "--to", "gguf")
    assert result.exit_code == 2
    assert "did you mean" in result.output
    result = draftlab(workshop, "push", "nowhere", "org/x", "--dry-run")
    assert result.exit_code == 2
