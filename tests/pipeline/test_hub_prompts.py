"""A data set of the Hub as the prompts of a recipe; a local folder stands in for the Hub."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftlab.errors import UserError
from draftlab.text import data_sets
from draftlab.text.prompts import find_prompts, select_prompts
from draftlab.text.settings import PromptSettings
from tests.helpers.messages import user
from tests.helpers.monitors import RecordingMonitor
from tests.helpers.small_run import draftlab, ran

COMMIT = "c" * 40
SOURCE = "org/chats@train"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A Hub with one data set of a Parquet file; the list gets what was asked for."""
    datasets = pytest.importorskip("datasets")
    rows = [{"messages": [user(f"Question {i // 2}?")]} for i in range(60)]
    (tmp_path / "org").mkdir()
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "org" / "train-00000-of-00001.parquet")
    asked: list[Any] = []
    load = datasets.load_dataset_builder

    def load_builder(path: str, config: str | None, *, revision: str) -> Any:
        asked.append((path, config, revision))
        return load(str(tmp_path / "org"))

    def info(_: Any, path: str, revision: str | None) -> Any:
        asked.append((path, revision))
        return SimpleNamespace(sha=COMMIT)

    monkeypatch.setenv("DRAFTLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets, "load_dataset_builder", load_builder)
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", info)
    monkeypatch.setattr(data_sets, "hub_answers", lambda: True)
    return asked


def test_a_data_set_is_read_once_at_one_commit(
    hub: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = PromptSettings(source=SOURCE, revision="v1", max_prompts=20)
    assert find_prompts(settings) is None
    prompts = select_prompts(settings, RecordingMonitor())
    assert [one.messages[0]["content"] for one in prompts] == [f"Question {i}?" for i in range(20)]
    assert {one.source for one in prompts} == {"org/chats"}
    assert hub == [("org/chats", "v1"), ("org/chats", None, COMMIT)]
    monkeypatch.setattr(data_sets, "hub_answers", lambda: False)
    assert select_prompts(settings, RecordingMonitor()) == prompts
    with pytest.raises(UserError, match="the Hub does not answer") as caught:
        select_prompts(PromptSettings(source=SOURCE), RecordingMonitor())
    assert caught.value.where == SOURCE


def test_a_run_records_the_commit_and_its_plan_needs_the_hub(
    hub: list[Any], workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ["prompts.source=org/chats", "prompts.max_prompts=8"]
    plan = ran(workshop, "run", "small.yaml", *settings, "--plan")
    assert "the run reads the data set org/chats from the Hub" in plan.output
    assert hub == []
    ran(workshop, "prepare", "small.yaml", *settings)
    (provenance,) = workshop.glob("runs/latest/provenance.json")
    written = json.loads(provenance.read_text())
    assert (written["prompts"], written["prompts_commit"]) == ("org/chats", COMMIT)
    monkeypatch.setattr(data_sets, "hub_answers", lambda: False)
    assert draftlab(workshop, "prepare", "small.yaml", *settings).exit_code == 0
    settings[1] = "prompts.max_prompts=9"
    plan = ran(workshop, "run", "small.yaml", *settings, "name=other", "--plan", code=2)
    assert "where: org/chats" in plan.output
    assert "chats.py org/chats --out prompts.jsonl" in plan.output


@pytest.mark.usefixtures("hub")
def test_only_parquet_and_json_are_read(tmp_path: Path) -> None:
    (parquet,) = (tmp_path / "org").iterdir()
    parquet.unlink()
    for name, message in (
        ("notes.pkl", "No (supported) data files"),
        ("train.csv", "of Parquet or JSON files, found one of the kind 'csv'"),
        ("org.py", "Dataset scripts are no longer supported"),
    ):
        (tmp_path / "org" / name).write_text("open('ran', 'w')\n1")
        with pytest.raises(UserError, match=re.escape(message)) as caught:
            select_prompts(PromptSettings(source="org/chats"), RecordingMonitor())
        assert "refs/convert/parquet" in caught.value.do
    assert not Path("ran").exists()


def test_a_file_has_no_revision(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no revision of a file, found 'main'"):
        find_prompts(PromptSettings(source="prompts.jsonl", revision="main"))
