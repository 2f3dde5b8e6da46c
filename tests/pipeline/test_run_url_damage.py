"""The copy of a run at a URL when files there are damaged, refused, or have no room."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from draftlab.pipeline.copied_run import RUN
from draftlab.store.object_store import UrlFolder
from tests.helpers.object_server import BUCKET, FaultyServer, object_server
from tests.helpers.small_run import contents, draftlab, finished, new_workshop

server = object_server(retry_s=0.6)


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the copy of a run whose training has copied its checkpoints, too."""
    folder = tmp_path_factory.mktemp("copied")
    first = new_workshop(folder / "first")
    result = draftlab(first, "run", "small.yaml", f"run.url=file://{folder}/there")
    assert result.exit_code == 0, result.output
    return folder / "there"


@pytest.fixture
def there(copied: Path, tmp_path: Path) -> Path:
    """Return such a folder that a test may change; it is at a file:// URL."""
    return Path(shutil.copytree(copied, tmp_path / "there"))


@pytest.fixture
def workshop(tmp_path: Path) -> Path:
    return new_workshop(tmp_path / "workshop")


def result_of(folder: Path, *, but: tuple[str, ...] = ()) -> dict[str, bytes]:
    """Return the files of a run or of its copy that do not depend on time or on run.url."""
    names = ("answers.jsonl", "answers.json", "head/", "train/best/", "stages/head.json")
    return {n: d for n, d in contents(folder).items() if n.startswith(names) and n not in but}


@pytest.mark.parametrize("name", ["head/model.safetensors", "answers.jsonl", "stages/head.json"])
@pytest.mark.parametrize("damage", ["truncated", "deleted", "changed"])
def test_a_damaged_stage_is_made_again(
    name: str, damage: str, there: Path, workshop: Path, tmp_path: Path
) -> None:
    before, path = result_of(there), there / name
    if damage == "deleted":
        path.unlink()
    else:
        data = path.read_bytes()
        path.write_bytes(data[:-1] + (b"" if damage == "truncated" else bytes([data[-1] ^ 1])))
    last = ("run", "small.yaml", f"run.url=file://{there}")
    if name == "answers.jsonl":  # which a head that is there does not need
        last = ("prepare", *last[1:])
    result = draftlab(workshop, *last)
    assert result.exit_code == 0, result.output
    stage = "answers" if name == "answers.jsonl" else "head"
    output = " ".join(result.output.split())
    assert output.count(f"warning: {stage} at file://{there} is not used: ") == 1
    assert str(path) in result.output.replace("\n", "")
    if name == "head/model.safetensors":
        assert "resuming training after step 6" in result.output
    if stage == "head":  # it was made of the damaged files, for all that anyone knows
        assert "eval: copied" not in result.output
        assert "eval: done in" in result.output
    assert result_of(there) == before
    other = draftlab(new_workshop(tmp_path / "third"), "run", "small.yaml", last[-1])
    assert other.exit_code == 0, other.output
    assert "warning" not in other.output.partition("Draft head")[0]
    assert result_of(tmp_path / "third/runs/small") == before


def test_a_damaged_recipe_is_left_out(there: Path, workshop: Path) -> None:
    (there / "recipe.yaml").unlink()
    result = draftlab(workshop, "run", "small.yaml", f"run.url=file://{there}")
    assert result.exit_code == 0, result.output
    assert "warning: recipe.yaml at" in result.output
    assert "head: there" in result.output


def test_what_a_server_refuses_is_not_made_again(
    server: FaultyServer, workshop: Path, tmp_path: Path
) -> None:
    url = f"run.url=s3://{BUCKET}/small"
    assert draftlab(workshop, "train", "small.yaml", url).exit_code == 0
    for part in ("/head/", "/train/checkpoints/"):

        def denied(method: str, path: str, number: int, part: str = part) -> str | None:
            return "denied" if method == "GET" and part in path else None

        server.faults = denied
        if part != "/head/":
            UrlFolder(url.partition("=")[2]).remove("head/model.safetensors")
        other = new_workshop(tmp_path / part.replace("/", "-"))
        result = draftlab(other, "train", "small.yaml", url)
        assert result.exit_code == 2, result.output
        assert "was refused: PermissionError" in " ".join(result.output.split())
        assert not (other / "runs/small/head/model.safetensors").exists()


def test_no_room_at_the_url_stops_no_training_and_is_named(
    workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, there = shutil.copyfile, tmp_path / "there"

    def fill(source: Path, target: Path, **options: bool) -> object:
        if "/there/train/" in str(target) or "/there/head/" in str(target):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(source), None, str(target))
        return copy(source, target, **options)

    monkeypatch.setattr(shutil, "copyfile", fill)
    result = draftlab(workshop, "train", "small.yaml", f"run.url=file://{there}")
    assert result.exit_code == 2
    output = " ".join(result.output.split())
    assert "warning: the checkpoint of step 2 is not at file://" in output
    assert "error: uploading failed: No space left on device" in output
    assert f"where: file://{there}/" in output.replace(" ", "").replace("where:", "where: ")
    assert "free space there" in output
    assert result_of(workshop / "runs/small") == result_of(finished() / "runs/small")


@pytest.mark.parametrize("scheme", ["file", "s3"])
def test_the_start_of_a_checkpoint_that_a_killed_process_left_is_removed(
    scheme: str, server: FaultyServer, workshop: Path, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/there" if scheme == "file" else f"s3://{BUCKET}/there"
    remote = UrlFolder(url)
    remote.write("train/checkpoints/step-0000003/optimizer.safetensors", b"half")
    remote.write("notes/mine.txt", b"mine")
    result = draftlab(workshop, "train", "small.yaml", f"run.url={url}")
    assert result.exit_code == 0, result.output
    steps = {name.split("/")[2] for name in remote.names("train/checkpoints")}
    assert "step-0000003" not in steps
    assert "step-0000006" in steps
    assert remote.read("notes/mine.txt") == b"mine"
    assert remote.read(RUN) is not None


@pytest.mark.parametrize("part", ["", "/copy"])
def test_a_url_in_the_run_folder_is_refused(part: str, workshop: Path) -> None:
    url = f"file://{workshop}/runs/small{part}"
    result = draftlab(workshop, "run", "small.yaml", f"run.url={url}")
    assert result.exit_code == 2
    assert "expected a folder outside of the run folder" in result.output
    assert not (workshop / "runs").exists()


def test_another_machine_may_have_target_and_prompts_elsewhere(there: Path, workshop: Path) -> None:
    for name in ("toy", "prompts.jsonl"):
        (workshop / name).rename(workshop / f"my-{name}")
    suite = "eval.suite=my-prompts.jsonl"
    places = ("target=my-toy", "prompts.source=my-prompts.jsonl", suite)
    url = f"run.url=file://{there}"
    result = draftlab(workshop, "train", "small.yaml", url, *places)
    assert result.exit_code == 0, result.output
    assert "head: there" in result.output
    with open(workshop / "my-prompts.jsonl", "a") as file:
        file.write('{"id": "more", "messages": [{"role": "user", "content": "more"}]}\n')
    result = draftlab(workshop, "train", "small.yaml", url, *places)
    assert result.exit_code == 2
    assert "prompts.sha256" in result.output
    assert "with another run.url" in " ".join(result.output.split())
