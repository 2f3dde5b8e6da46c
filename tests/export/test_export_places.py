"""Exports are refused or complete: nothing on disk is lost or half-written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import save_file

from draftlab.errors import UserError
from draftlab.export import weight_files as weights
from draftlab.export import write
from draftlab.export.destination import atomic_folder
from tests.helpers.export_toys import LAYERS, MakeHead, export, make_target, verify


def test_another_target_is_refused_with_both_fingerprints(
    make_head: MakeHead, target: Path, tmp_path: Path
) -> None:
    head = make_head()
    other = make_target(tmp_path / "other", seed=1)
    with pytest.raises(UserError) as caught:
        export(head, other, tmp_path / "out")
    fingerprint = json.loads((head / "draftlab.json").read_text())["target"]["fingerprint"]
    assert fingerprint in str(caught.value)
    assert write.fingerprint(other) in str(caught.value)
    deeper = make_target(tmp_path / "deeper", layers=LAYERS + 1)
    with pytest.raises(UserError, match=f"num_hidden_layers {LAYERS}, this one has {LAYERS + 1}"):
        export(head, deeper, tmp_path / "out")
    with pytest.raises(UserError, match=r"target's config\.json"):
        export(head, tmp_path / "nowhere", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_broken_head_is_refused_and_the_old_export_stays(
    make_head: MakeHead, target: Path, tmp_path: Path
) -> None:
    head, out = make_head(), tmp_path / "out"
    export(head, target, out)
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    file = head / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(UserError, match=r"model\.safetensors"):
        export(head, target, out)
    file.unlink()
    with pytest.raises(UserError, match=r"model\.safetensors"):
        export(head, target, out)
    with pytest.raises(UserError, match=r"draftlab\.json"):
        export(tmp_path / "nowhere", target, out)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    assert not list(tmp_path.glob(".out*"))


def test_an_export_that_reads_back_wrong_never_appears(
    make_head: MakeHead, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save_wrong(tensors: dict, file: Path, **options: object) -> None:
        save_file(tensors | {"norm.weight": tensors["norm.weight"] + 1}, file, **options)

    head, out = make_head(), tmp_path / "out"
    export(head, target, out, k=2)
    monkeypatch.setattr(weights, "save_tensors", save_wrong)
    with pytest.raises(UserError, match=r"norm\.weight"):
        export(head, target, out, k=3)
    with pytest.raises(UserError, match=r"norm\.weight"):
        export(head, target, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]
    monkeypatch.undo()
    verify(out, head, target)
    assert '"speculative_tokens": 2' in (out / "config.json").read_text()
    export(head, target, out, k=3)
    assert '"speculative_tokens": 3' in (out / "config.json").read_text()
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_folders_that_are_no_export_are_not_replaced(
    make_head: MakeHead, target: Path, tmp_path: Path
) -> None:
    head = make_head()
    (tmp_path / "file").write_text("user")
    for place in ("file", "file/inside/out"):
        with pytest.raises(UserError, match="found a file"):
            export(head, target, tmp_path / place)
    folder = tmp_path / "user"
    folder.mkdir()
    (folder / "thesis.tex").write_text("user")
    with pytest.raises(UserError, match=r"thesis\.tex"):
        export(head, target, folder)
    with pytest.raises(UserError, match=r"draftlab\.json"):
        export(head, target, head)
    (folder / "thesis.tex").rename(folder / "config.json")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UserError, match=r"a model without launch\.md"):
        export(head, target, folder)
    assert (tmp_path / "file").read_text() == "user"


def test_heads_the_layout_cannot_hold_are_refused(
    make_head: MakeHead, target: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="as wide as their target"):
        export(make_head(hidden_size=16, embeddings="own"), target, tmp_path / "out")
    odd = make_head(num_attention_heads=6, num_key_value_heads=2)
    with pytest.raises(UserError, match="num_attention_heads"):
        export(odd, target, tmp_path / "out")


def test_a_rename_that_fails_leaves_the_old_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, rename = tmp_path / "out", Path.rename
    with atomic_folder(place) as folder:
        (folder / "a").write_text("old")

    def fail(path: Path, onto: Path) -> Path:
        if path.suffix == ".tmp":
            raise OSError("disk gone")
        return rename(path, onto)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="disk gone"), atomic_folder(place) as folder:
        (folder / "a").write_text("new")
    assert (place / "a").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
