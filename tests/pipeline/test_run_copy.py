"""The copy of a run by itself, in a folder at a file:// URL: checkpoints, files and claims."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftlab.errors import UserError
from draftlab.files import write_json
from draftlab.pipeline.checkpoint_copies import CheckpointCopies, copying
from draftlab.pipeline.copied_run import RUN, CopiedRun
from draftlab.pipeline.run_copy import RunCopy
from draftlab.store.object_store import UrlFolder
from draftlab.store.url_claim import CLAIM, LostClaimError
from draftlab.train.checkpoint import MOMENTS, STATE, WEIGHTS
from tests.helpers.monitors import RecordingMonitor
from tests.helpers.small_run import contents, half_written

CHECKPOINT = (STATE, WEIGHTS, MOMENTS)


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
