"""Exports are refused or complete: nothing on disk is lost or half-written."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import save_file
from torch import Tensor

from draftlab.errors import UserError
from draftlab.export import weight_files as weights
from draftlab.export import write
from draftlab.export.settings import ExportSettings
from draftlab.files import atomic_folder
from draftlab.heads.folder import load_config
from draftlab.run.api import export_layouts
from draftlab.target_model.settings import TargetSettings
from tests.helpers.export_toys import HIDDEN, ExportHead, change_tensors, export
from tests.helpers.monitors import RecordingMonitor
from tests.helpers.small_run import contents
from tests.helpers.toys import toy_target_folder


def test_another_target_is_refused_with_both_fingerprints(
    export_head: ExportHead, tmp_path: Path
) -> None:
    head = export_head().head
    other = toy_target_folder(tmp_path / "other", hidden=HIDDEN, tied=False, seed=1)
    with pytest.raises(UserError) as caught:
        export(head, other, tmp_path / "out")
    assert load_config(head).target.fingerprint in str(caught.value)
    assert write.fingerprint(other) in str(caught.value)
    with pytest.raises(UserError, match=r"target's config\.json"):
        export(head, tmp_path / "nowhere", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_broken_head_is_refused_and_the_old_export_stays(
    export_head: ExportHead, tmp_path: Path
) -> None:
    exported = export_head()
    head, target, out = exported.head, exported.target, exported.folder
    before, file = contents(out), head / "model.safetensors"
    change_tensors(head, lambda tensors: tensors.pop("norm.weight"))
    with pytest.raises(UserError, match=r"missing norm\.weight"):
        export(head, target, out)
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(UserError, match=r"model\.safetensors"):
        export(head, target, out)
    file.unlink()
    with pytest.raises(UserError, match=r"model\.safetensors"):
        export(head, target, out)
    with pytest.raises(UserError, match=r"draftlab\.json"):
        export(tmp_path / "nowhere", target, out)
    assert contents(out) == before
    assert not list(tmp_path.glob(".*"))


def test_an_export_that_reads_back_wrong_never_appears(
    export_head: ExportHead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save_wrong(tensors: dict, file: Path, **options: object) -> None:
        save_file(tensors | {"norm.weight": tensors["norm.weight"] + 1}, file, **options)

    exported = export_head(k=2)
    before = contents(exported.folder)
    monkeypatch.setattr(weights, "save_tensors", save_wrong)
    for out in (exported.folder, tmp_path / "new"):
        with pytest.raises(UserError, match=r"norm\.weight"):
            export(exported.head, exported.target, out, k=3)
    assert not (tmp_path / "new").exists()
    assert contents(exported.folder) == before
    assert not list(tmp_path.glob(".*"))


def test_folders_that_are_no_export_are_not_replaced(
    export_head: ExportHead, tmp_path: Path
) -> None:
    exported, folder = export_head(), tmp_path / "user"
    (tmp_path / "file").write_text("user")
    folder.mkdir()
    (folder / "thesis.tex").write_text("user")
    for place, message in (
        (tmp_path / "file", "found a file"),
        (tmp_path / "file/inside/out", "found a file"),
        (folder, r"thesis\.tex"),
        (exported.head, r"draftlab\.json"),
    ):
        with pytest.raises(UserError, match=message):
            export(exported.head, exported.target, place)
    (folder / "thesis.tex").rename(folder / "config.json")
    with pytest.raises(UserError, match=r"a model without launch\.md"):
        export(exported.head, exported.target, folder)
    assert contents(folder) == {"config.json": b"user"}
    assert (tmp_path / "file").read_text() == "user"


@pytest.mark.parametrize(
    "name", ["target.gguf", "model-00001-of-00009.safetensors", ".git", "sts.json"]
)
def test_an_export_with_files_of_others_is_not_replaced(
    name: str, export_head: ExportHead, tmp_path: Path
) -> None:
    """The names are ones that an export has under other conditions: as a file, or in its index."""
    exported = export_head()
    for size in ("10KB", "20KB"):  # shards of the first are replaced by other ones
        export(exported.head, exported.target, exported.folder, max_shard=size)
    if name.endswith((".gguf", ".safetensors")):
        (exported.folder / name).write_text("user")
    else:
        (exported.folder / name).mkdir()
    before = contents(exported.folder)
    with pytest.raises(UserError, match=f"earlier export, found {name}"):
        export(exported.head, exported.target, exported.folder)
    assert contents(exported.folder) == before


def test_a_rename_that_fails_leaves_the_old_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, rename = tmp_path / "out", Path.rename
    with atomic_folder(place) as folder:
        (folder / "a").write_text("old")

    def fail(path: Path, onto: Path) -> Path:
        if path.suffix == ".tmp" and ".old." not in path.name:
            raise OSError("disk gone")
        return rename(path, onto)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="disk gone"), atomic_folder(place) as folder:
        (folder / "a").write_text("new")
    assert (place / "a").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_the_other_layouts_are_whole_if_one_fails(
    export_head: ExportHead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported, monitor, right = export_head(), RecordingMonitor(), write.write_weights

    def write_weights(tensors: dict[str, Tensor], folder: Path) -> None:
        if folder.name.startswith(".vllm."):
            raise UserError("no space is left")
        right(tensors, folder)

    monkeypatch.setattr(write, "write_weights", write_weights)
    places = {name: tmp_path / name for name in ("vllm", "speculators")}
    target, settings = TargetSettings(path=str(exported.target)), ExportSettings()
    with pytest.raises(UserError, match="no space is left"):
        export_layouts(exported.head, target, places, settings=settings, monitor=monitor)
    written = [line for line in monitor.lines if "was loaded back and is equal" in line]
    assert len(written) == 1
    assert str(places["speculators"]) in written[0]
    assert (places["speculators"] / "model.safetensors").is_file()
    assert not places["vllm"].exists()
    assert not list(tmp_path.glob(".*"))
