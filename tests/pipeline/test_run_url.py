"""A run whose files are copied to a URL: another machine goes on with it, to the same bytes."""

from __future__ import annotations

import contextlib
import json
import re
import signal
from pathlib import Path

import pytest

from draftlab.pipeline.copied_run import RUN
from draftlab.pipeline.pipeline import Pipeline
from draftlab.pipeline.recipe import load_recipe
from draftlab.pipeline.run_copy import ID
from draftlab.store.object_store import UrlFolder
from draftlab.store.transfer_errors import UnreachableError
from tests.helpers.object_server import BUCKET, FaultyServer, object_server
from tests.helpers.small_run import (
    SignallingMonitor,
    contents,
    copy_of_finished,
    draftlab,
    finished,
    half_written,
    new_workshop,
    snapshot,
)

URL = f"s3://{BUCKET}/small"
AT_URL = f"run.url={URL}"
server = object_server(retry_s=0.6)


@pytest.fixture
def workshop(tmp_path: Path) -> Path:
    return new_workshop(tmp_path / "workshop")


def objects() -> dict[str, bytes]:
    """Return all objects at the URL."""
    file_system, root = UrlFolder(URL)._opened
    file_system.invalidate_cache()
    names = {path.removeprefix(f"{root}/"): path for path in file_system.find(root)}
    return {name: file_system.cat_file(path) for name, path in names.items()}


def train_until(workshop: Path, step: int, *settings: str) -> list[str]:
    """Train until a signal comes in a step, as from a machine that is taken away; return the lines
    on the console."""
    with contextlib.chdir(workshop):
        recipe = load_recipe(Path("small.yaml"), [AT_URL, *settings])
        monitor = SignallingMonitor(signal.SIGTERM, step)
        with pytest.raises(SystemExit):
            Pipeline(recipe, monitor).make("head")
    return monitor.lines


def test_another_machine_goes_on_to_the_same_bytes(
    server: FaultyServer, workshop: Path, tmp_path: Path
) -> None:
    # The best head and the count of validations without a better one belong to a checkpoint.
    validating = (
        *("train.validate_every=1", "train.early_stopping=4", "train.learning_rate=0.3"),
        "train.checkpoint_every=10",  # at the signal and at the end
    )
    local = new_workshop(tmp_path / "local")
    assert draftlab(local, "train", "small.yaml", *validating).exit_code == 0
    best = json.loads((local / "runs/small/train/best/best.json").read_text())["step"]
    assert best < 3, "the best head comes from the first machine"
    shards = f"record.url=file://{tmp_path}/shards"
    lines = train_until(workshop, 3, shards, *validating)
    assert any(f"the checkpoint of step 3 is at {URL}" in line for line in lines), lines
    other = new_workshop(tmp_path / "other")
    result = draftlab(other, "train", "small.yaml", AT_URL, shards, *validating)
    assert result.exit_code == 0, result.output
    assert f"answers: copied from {URL}" in result.output
    assert f"this recording is complete at {tmp_path}/shards" in result.output
    assert f"the checkpoint of step 3 is copied from {URL}" in result.output
    assert "resuming training after step 3" in result.output
    assert "worked in this run and did not finish" in result.output
    assert contents(other / "runs/small/head") == contents(local / "runs/small/head")
    for data in [*objects().values(), *contents(other).values(), result.output.encode()]:
        assert b"secret-of-the-test" not in data
        assert b"key-of-the-test" not in data
    rows = [workshop.parent / one / "runs/small/train/metrics.jsonl" for one in ("local", "other")]
    steps = [[json.loads(row)["step"] for row in path.read_text().splitlines()] for path in rows]
    assert steps[0] == steps[1]
    # The first machine comes back, and finds the head.
    result = draftlab(workshop, "train", "small.yaml", AT_URL, shards, *validating)
    assert result.exit_code == 0, result.output
    assert f"head: copied from {URL}" in result.output
    assert contents(workshop / "runs/small/head") == contents(local / "runs/small/head")
    for folder in (workshop, other):
        assert not half_written(folder / "runs")


def at(folder: Path) -> str:
    """Return the setting for a copy in a folder."""
    return f"run.url=file://{folder}"


def test_a_finished_run_is_copied_whole(workshop: Path, tmp_path: Path) -> None:
    first, there = copy_of_finished(tmp_path / "first"), tmp_path / "there"
    result = draftlab(first, "run", "small.yaml", at(there))
    assert result.exit_code == 0, result.output
    run = first / "runs/small"
    expected = {
        name: data
        for name, data in contents(run).items()
        if not name.startswith(("store/", "answers.index/", "train/checkpoints/", "."))
        and name not in (ID, "stages/store.json", "train/verified.safetensors")
    }
    files = contents(there)
    listed = json.loads(files.pop(RUN))["files"]
    assert files == expected
    assert listed.keys() == expected.keys()
    times = snapshot(there)
    assert draftlab(first, "run", "small.yaml", at(there)).exit_code == 0
    assert snapshot(there) == times  # everything was there
    # Another machine has it.
    result = draftlab(workshop, "run", "small.yaml", at(there))
    assert result.exit_code == 0, result.output
    assert "store: not there, and not needed" in result.output
    other = contents(workshop / "runs/small")
    for name in expected.keys() - {"recipe.yaml"}:
        assert other[name] == expected[name], name
    inspected = draftlab(workshop, "inspect", f"file://{there}")
    assert inspected.exit_code == 0, inspected.output
    assert "run small" in inspected.output
    assert "At T = 0 and K = 2 small has AL" in inspected.output
    # A stage that runs again with other settings replaces its files there.
    result = draftlab(workshop, "run", "small.yaml", at(there), "export.formats=[]")
    assert result.exit_code == 0, result.output
    assert not list(there.glob("export/*/*"))


def test_another_run_is_refused_and_changes_nothing(workshop: Path, tmp_path: Path) -> None:
    first, there = copy_of_finished(tmp_path / "first"), tmp_path / "there"
    assert draftlab(first, "run", "small.yaml", at(there)).exit_code == 0
    before = contents(there)
    result = draftlab(workshop, "run", "small.yaml", at(there), "train.steps=5")
    assert result.exit_code == 2
    assert "train.steps: 6 in the run, 5 now" in result.output
    result = draftlab(workshop, "run", "small.yaml", at(there), "name=third")
    assert result.exit_code == 2
    assert "found run small" in result.output
    own = copy_of_finished(tmp_path / "own")  # the same, but it was computed here
    result = draftlab(own, "run", "small.yaml", at(there))
    assert result.exit_code == 2
    assert "found another run of this name" in result.output
    assert contents(there) == before


def test_a_copy_that_fails_stops_no_training_and_is_an_error_at_its_end(
    workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload, there = UrlFolder.upload, tmp_path / "there"

    def fail(remote: UrlFolder, path: Path, name: str) -> None:
        if "step-" in name or name.startswith("head/"):
            raise UnreachableError("no answer", where=remote.where(name), do="wait")
        upload(remote, path, name)

    monkeypatch.setattr(UrlFolder, "upload", fail)
    result = draftlab(workshop, "train", "small.yaml", at(there))
    assert result.exit_code == 2, result.output
    assert re.search(r"warning: the checkpoint of step \d is not at file://", result.output)
    assert "no answer" in result.output
    head = contents(workshop / "runs/small/head")
    assert head == contents(finished() / "runs/small/head")
    assert not (there / "head").exists()
    monkeypatch.undo()
    result = draftlab(workshop, "train", "small.yaml", at(there))
    assert result.exit_code == 0, result.output
    assert "head: there" in result.output
    assert contents(there / "head") == head


def test_the_plan_says_what_is_copied(workshop: Path) -> None:
    result = draftlab(workshop, "run", "small.yaml", AT_URL, "--plan")
    assert result.exit_code == 0, result.output
    line = next(line for line in result.output.splitlines() if "run.url" in line)
    assert URL in line
    assert "kB" in line
    assert not (workshop / "runs").exists()


def test_one_url_for_both_is_refused(workshop: Path) -> None:
    result = draftlab(workshop, "run", "small.yaml", AT_URL, f"record.url={URL}")
    assert result.exit_code == 2
    assert "expected two folders" in result.output
    result = draftlab(workshop, "run", "small.yaml", "run.url=memory://x")
    assert result.exit_code == 2
    assert "run.url" in result.output
