"""A run whose files are copied to a URL: another machine goes on with it, to the same bytes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftlab.errors import UserError
from draftlab.files import write_json
from draftlab.pipeline.checkpoint_copies import CheckpointCopies, copying
from draftlab.pipeline.copied_run import RUN, CopiedRun
from draftlab.pipeline.pipeline import Pipeline
from draftlab.pipeline.recipe import load_recipe
from draftlab.pipeline.run_copy import ID, RunCopy
from draftlab.store.object_store import UrlFolder
from draftlab.store.transfer_errors import UnreachableError
from draftlab.store.url_claim import CLAIM, LostClaimError
from draftlab.train.checkpoint import MOMENTS, STATE, WEIGHTS
from tests.helpers.monitors import RecordingMonitor
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
CHECKPOINT = (STATE, WEIGHTS, MOMENTS)


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


# The copy by itself, in a folder at a file:// URL.


def new_copy(folder: Path, url: str, name: str = "small") -> RunCopy:
    folder.mkdir(parents=True, exist_ok=True)
    return RunCopy(folder, name, url, RecordingMonitor())


def new_checkpoint(folder: Path, step: int) -> Path:
    """Write the files of a checkpoint into the train/ folder of a run."""
    path = folder / f"train/checkpoints/step-{step:07d}"
    path.mkdir(parents=True, exist_ok=True)
    write_json(path / STATE, {"step": step, "verified": True})
    for name in (WEIGHTS, MOMENTS):
        (path / name).write_bytes(os.urandom(1000))
    return path


def files_of(checkpoint: Path) -> dict[str, Path]:
    return {name: checkpoint / name for name in CHECKPOINT}


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/a%20b/copy"


def begun(folder: Path, url: str) -> RunCopy:
    """Return the copy of a run whose training has begun."""
    copy = new_copy(folder, url)
    copy.begin()
    write_json(folder / "stages/head.json", {"complete": False, "inputs": {}})
    copy.push()
    return copy


def test_a_checkpoint_that_is_not_whole_is_not_there(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    copy = begun(folder, url)
    for step in (2, 4, 6):
        copy.push_checkpoint(step, files_of(new_checkpoint(folder, step)))
    root = tmp_path / "a b/copy/train/checkpoints"
    assert sorted(path.name for path in root.iterdir() if any(path.iterdir())) == [
        "step-0000004",
        "step-0000006",
    ]
    upload = UrlFolder.upload

    def killed(remote: UrlFolder, path: Path, name: str) -> None:
        if name.endswith(MOMENTS):
            raise KeyboardInterrupt
        upload(remote, path, name)

    monkeypatch.setattr(UrlFolder, "upload", killed)
    with pytest.raises(KeyboardInterrupt):
        copy.push_checkpoint(8, files_of(new_checkpoint(folder, 8)))
    assert (root / "step-0000008" / WEIGHTS).is_file()
    other = new_copy(tmp_path / "other", url)
    other.pull()
    (path,) = (tmp_path / "other/train/checkpoints").iterdir()
    expected = contents(folder / "train/checkpoints/step-0000006")
    assert contents(path) == expected
    assert path.name == "step-0000006"
    # It is copied when the training comes there again, and older ones go.
    monkeypatch.undo()
    copy.push_checkpoint(8, files_of(new_checkpoint(folder, 8)))
    assert copied_at(url).steps() == [6, 8]
    # Steps behind the training's are of an attempt that another one replaces.
    copy.push_checkpoint(7, files_of(new_checkpoint(folder, 7)))
    assert copied_at(url).steps() == [6, 7]


def copied_at(url: str) -> CopiedRun:
    run = CopiedRun.read(UrlFolder(url))
    assert run is not None
    return run


def test_a_damaged_checkpoint_is_left_out(tmp_path: Path, url: str) -> None:
    folder = tmp_path / "run"
    copy = begun(folder, url)
    for step in (2, 4):
        copy.push_checkpoint(step, files_of(new_checkpoint(folder, step)))
    damaged = tmp_path / f"a b/copy/train/checkpoints/step-0000004/{WEIGHTS}"
    damaged.write_bytes(os.urandom(1000))
    other = new_copy(tmp_path / "other", url)
    other.pull()
    assert [p.name for p in (tmp_path / "other/train/checkpoints").iterdir()] == ["step-0000002"]
    assert "warning: the checkpoint of step 4" in other.monitor.text
    damaged.unlink()
    again = new_copy(tmp_path / "again", url)
    again.pull()
    assert [p.name for p in (tmp_path / "again/train/checkpoints").iterdir()] == ["step-0000002"]


def test_a_replaced_file_is_off_the_list_until_it_is_there(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    (folder / "stages").mkdir(parents=True)
    copy = new_copy(folder, url)
    copy.begin()
    (folder / "answers.jsonl").write_text("a\n")
    write_json(folder / "stages/answers.json", {"complete": True, "inputs": {}})
    copy.push()
    (folder / "answers.jsonl").write_text("b\n")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(UrlFolder, "upload", killed)
    write = CopiedRun.write
    monkeypatch.setattr(
        CopiedRun,
        "write",
        lambda run, remote: Path(f"{tmp_path}/a b/copy/{RUN}").write_text(
            json.dumps(run.model_dump(by_alias=True))
        ),
    )
    with pytest.raises(KeyboardInterrupt):
        copy.push()
    assert copied_at(url).files.keys() == {"stages/answers.json"}
    monkeypatch.setattr(CopiedRun, "write", write)


def test_the_process_that_came_last_writes(tmp_path: Path, url: str) -> None:
    first = begun(tmp_path / "first", url)
    first.push_checkpoint(2, files_of(new_checkpoint(tmp_path / "first", 2)))
    second = new_copy(tmp_path / "second", url)
    second.pull()
    second.begin()
    assert "worked in this run and did not finish" in second.monitor.text
    before = contents(tmp_path / "a b/copy")
    checkpoint = new_checkpoint(tmp_path / "first", 4)
    with pytest.raises(LostClaimError, match="another process has begun to write there"):
        first.push_checkpoint(4, files_of(checkpoint))
    copies = CheckpointCopies(first, first.monitor)
    copies.add(checkpoint)
    with pytest.raises(LostClaimError):
        copies.close()
    first.release()
    assert contents(tmp_path / "a b/copy") == before
    second.push_checkpoint(4, files_of(new_checkpoint(tmp_path / "second", 4)))
    second.release()
    assert not (tmp_path / "a b/copy" / CLAIM).exists()
    assert not (tmp_path / "second" / CLAIM).exists()


@pytest.mark.parametrize(
    "name", ["../x", "/etc/x", "head/../../x", "head/.x", "store/x", "head/a/b", "stages/x.json"]
)
def test_names_that_lead_elsewhere_are_refused(name: str, tmp_path: Path, url: str) -> None:
    run = {"schema": 1, "id": "0" * 32, "name": "small"}
    run["files"] = {name: {"bytes": 1, "sha256": "0" * 64}}
    UrlFolder(url).write(RUN, json.dumps(run).encode())
    with pytest.raises(UserError, match="expected the list of a run's files"):
        new_copy(tmp_path / "run", url).pull()


def test_a_newer_checkpoint_takes_the_place_of_one_that_waits(tmp_path: Path) -> None:
    """The training never waits, and at most one checkpoint beside the copied one is kept."""
    started, may_end = threading.Event(), threading.Event()
    pushed: list[tuple[int, dict[str, bytes]]] = []

    def push(step: int, files: dict[str, Path]) -> None:
        started.set()
        assert may_end.wait(60)
        pushed.append((step, {name: path.read_bytes() for name, path in files.items()}))

    copy: Any = SimpleNamespace(push_checkpoint=push, remote=UrlFolder("file:///nowhere"))
    monitor, expected = RecordingMonitor(), {}
    (tmp_path / "train/best").mkdir(parents=True)
    write_json(tmp_path / "train/best/best.json", {"step": 1})
    with copying(copy, monitor) as copies:
        for step in (1, 2, 3):
            (tmp_path / "train/metrics.jsonl").write_text(f"{step}\n")
            checkpoint = new_checkpoint(tmp_path, step)
            expected[step] = contents(checkpoint)
            copies.add(checkpoint)
            assert started.wait(60)
            for path in checkpoint.iterdir():  # as the training does with old ones
                path.unlink()
        may_end.set()
    assert [step for step, _ in pushed] == [1, 3]
    for step, files in pushed:
        assert {name: files[name] for name in CHECKPOINT} == expected[step]
        assert files["metrics.jsonl"] == f"{step}\n".encode()
        assert "best/best.json" in files
    assert "the checkpoint of step 2 is not copied" in monitor.text
    assert not half_written(tmp_path)


def test_a_checkpoint_on_shards_without_checked_hashes_is_not_copied(tmp_path: Path) -> None:
    """Another machine takes what it copies for right, and does not set it aside."""
    pushed: list[int] = []
    copy: Any = SimpleNamespace(
        push_checkpoint=lambda step, files: pushed.append(step), remote=UrlFolder("file:///nowhere")
    )
    monitor = RecordingMonitor()
    with copying(copy, monitor) as copies:
        for step, verified in ((1, False), (2, True)):
            checkpoint = new_checkpoint(tmp_path, step)
            state = json.loads((checkpoint / STATE).read_text())
            write_json(checkpoint / STATE, state | {"verified": verified})
            copies.add(checkpoint)
    assert pushed == [2]
    assert "the checkpoint of step 1 is not copied, since not all shards" in monitor.text


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
