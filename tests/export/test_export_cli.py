"""`draftlab export` and `draftlab import` from the command line."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest

from draftlab.export import gguf
from draftlab.heads.folder import load_config
from tests.helpers.export_toys import (
    BOUNDARIES,
    HIDDEN,
    change_config,
    read_config,
    save_random_head,
)
from tests.helpers.small_run import draftlab, ran, refused
from tests.helpers.toys import toy_target_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds a target and a head."""
    folder = tmp_path_factory.mktemp("cli")
    target = toy_target_folder(folder / "target", hidden=HIDDEN, tied=False)
    save_random_head(folder / "head", target)
    return folder


def test_export_and_import_of_a_head(folder: Path, tmp_path: Path) -> None:
    head = ("--head", folder / "head", "--target", folder / "target")
    with patch("draftlab.export.weight_files.MAX_SHARD", "8KB"):
        out = draftlab(
            tmp_path, "export", *head, "--to", "sglang", "--k", 3, "--out", tmp_path / "x"
        )
    assert out.exit_code == 0, out.output
    assert "holds the head in sglang layout; it was loaded back and is equal" in out.stderr
    assert len(list((tmp_path / "x").glob("model-*.safetensors"))) > 1
    assert "--speculative-num-steps 3" in (tmp_path / "x" / "launch.md").read_text()

    back = ("import", tmp_path / "x", "--target", folder / "target", "--to")
    result = ran(tmp_path, *back, tmp_path / "back")
    assert "boundaries [1, 3, 5], inputs of layers" in result.stderr
    assert f"next: draftlab doctor {tmp_path}/back" in result.stderr.replace("\n", "")
    config = load_config(tmp_path / "back")
    assert (config.boundaries, config.k_trained) == (BOUNDARIES, 3)
    saved = (folder / "head" / "model.safetensors").read_bytes()
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == saved

    change_config(tmp_path / "x", odd=1, norm_before_residual=None)
    assert "--ignore odd" in refused(tmp_path, *back, tmp_path / "other")
    options = ["--ignore", "odd", "--boundaries", "2,4,6", "--norm-before-residual"]
    result = ran(tmp_path, *back, tmp_path / "other", *options, "--dtype", "float32")
    config = load_config(tmp_path / "other")
    assert config.boundaries == (2, 4, 6)
    assert config.norm_before_residual
    assert read_config(tmp_path / "other")["dtype"] == "float32"


def test_mistakes_are_printed_as_one_block(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = ("--head", folder / "head", "--target", folder / "target", "--out", tmp_path / "x")
    assert "did you mean 'llamacpp'" in refused(tmp_path, "export", *head, "--to", "gguf")
    monkeypatch.delenv(gguf.FOLDER, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "LLAMA_CPP" in refused(tmp_path, "export", *head, "--to", "llamacpp", "--gguf")
    assert "llamacpp among the layouts" in refused(tmp_path, "export", *head, "--gguf")
    to = ("--to", tmp_path / "back")
    assert "one of draftlab's own" in refused(tmp_path, "import", folder / "head", *to)
    assert "found '1,x'" in refused(tmp_path, "import", folder / "head", *to, "--boundaries", "1,x")
    assert "found 'int8'" in refused(tmp_path, "import", folder / "head", *to, "--dtype", "int8")
    assert not (tmp_path / "x").exists()
    assert not (tmp_path / "back").exists()
